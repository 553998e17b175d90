// Paged attention, and what stands in front of it. A state is kv[P][2][Hk][16][D], f32 or bf16.

// Rotates queries and keys of a token and writes keys and values into the cache: one block for each token and
// head. Any of the three parts may be missing (0 heads).
struct RopeArgs {
  const float* q;      // [T][heads·d], rotated into q_out
  i64 q_stride, heads;
  float* q_out;
  i64 q_out_stride;
  const float* k;      // [T][kv_heads·d], rotated into k_out (0: only into the cache)
  i64 k_stride, k_heads;
  float* k_out;
  i64 k_out_stride;
  const float* v;      // [T][kv_heads·dv]
  i64 v_stride, v_heads;
  const float* table;  // [T][D] cosines, sines; 0: keys are rotated already
  i64 table_stride, half, d, dv;
  char* kv;            // 0: no cache
  i64 dim, bf16;
  const void *positions, *seq, *pages;
  const i64 *page_stride, *rows;
};

__device__ __forceinline__ void put(char* kv, i64 at, float v, i64 bf16) {
  if (bf16) ((u16*)kv)[at] = (u16)bf16_of(v);
  else ((float*)kv)[at] = v;
}

// Where a head of a token comes from and goes to; everything but x and the table is known before them.
struct Turned {
  const float *x, *cosine, *sine;  // cosine 0: not rotated
  float* y;                        // 0: only into the cache
  i64 entry, half, width;          // entry: of the cache, or -1

  __device__ __forceinline__ Turned(const RopeArgs& a, i64 t, i64 head) {
    const bool is_q = head < a.heads, is_k = !is_q && head < a.heads + a.k_heads;
    if (!is_q) head -= is_k ? a.heads : a.heads + a.k_heads;
    width = is_q || is_k ? a.d : a.dv;
    x = is_q ? a.q + t * a.q_stride + head * width
      : is_k ? a.k + t * a.k_stride + head * width : a.v + t * a.v_stride + head * width;
    y = is_q ? a.q_out + t * a.q_out_stride + head * width
      : is_k && a.k_out ? a.k_out + t * a.k_out_stride + head * width : (float*)0;
    entry = -1;
    if (a.kv && !is_q) {
      const i64 p = from_host((const int*)a.positions + t), s = from_host((const int*)a.seq + t);
      const i64 page = from_host((const int*)a.pages + s * from_host(a.page_stride) + p / 16);
      entry = (((page * 2 + (is_k ? 0 : 1)) * (is_k ? a.k_heads : a.v_heads) + head) * 16 + p % 16) * a.dim;
    }
    half = a.half;
    cosine = (is_q || is_k) && a.table ? a.table + t * a.table_stride : (const float*)0;
    sine = cosine + half;
  }

  __device__ __forceinline__ void run(const RopeArgs& a, int thread, int threads) const {
    for (i64 i = thread; i < width; i += threads) {
      float v = x[i];
      if (cosine && i < 2 * half) {
        const i64 r = i < half ? i : i - half;
        const float c = cosine[r], s = sine[r], other = x[i < half ? i + half : r];
        v = i < half ? __fsub_rn(__fmul_rn(v, c), __fmul_rn(other, s)) : __fadd_rn(__fmul_rn(v, c), __fmul_rn(other, s));
      }
      if (y) y[i] = v;
      if (entry >= 0) put(a.kv, entry + i, v, a.bf16);
    }
  }
};

extern "C" __global__ void rope(RopeArgs a) {
  let_others_start();
  const i64 t = blockIdx.x;
  if (t >= from_host(a.rows)) { after_others(); return; }
  const Turned head(a, t, blockIdx.y);
  after_others();
  head.run(a, threadIdx.x, blockDim.x);
}

// A block of 4 warps (2 for very wide heads) takes a range of keys of one token and one key head, a page of 16
// a warp; ranges are merged in order. Where few tokens leave the device idle (`split`) every range has a block
// of its own, and the last block that is through merges them; else one block takes range after range: the same
// sums in the same order. Pages that no token of this step writes are read while the kernel before still runs.
struct AttentionArgs {
  const float* q;
  i64 q_stride, heads, kv_heads, d, dv;
  const char* kv;
  i64 dim, bf16;
  const int *positions, *seq, *pages;
  const i64* page_stride;
  float* y;
  i64 y_stride, y_bf16;
  const float* sinks;
  double scale, softcap;
  i64 window, causal, rounded;  // rounded: queries and weights are bf16
  const i64* rows;
  i64 split;
  float* parts;                 // [T][kv_heads·batches][ranges][G][dim + 2]: sums, largest, total
  int* through;                 // [T][kv_heads·batches], 0 before and after
};

constexpr float NEGATIVE = -3.0e38f;  // below every score; a difference of two such is no NaN

// A warp's page in shared memory: 16 keys, then 16 values. A row is padded so that four of them lie in
// different banks.
struct Page {
  char* at;
  int pitch;  // bytes
  __device__ __forceinline__ const char* key(int i) const { return at + i * pitch; }
  __device__ __forceinline__ const char* value(int i) const { return at + (16 + i) * pitch; }
};

__device__ __forceinline__ void copy_page(const AttentionArgs& a, const Page& to, int page, int head, int lane) {
  const int bytes = (int)a.dim * (a.bf16 ? 2 : 4);
  for (int which = 0; which < 2; ++which) {
    const char* from = a.kv + (((i64)page * 2 + which) * (int)a.kv_heads + head) * 16 * bytes;
    for (int i = lane >> 3; i < 16; i += 4) {
      char* row = to.at + (which * 16 + i) * to.pitch;
      if (bytes % 16 == 0)
        for (int c = (lane & 7) * 16; c < bytes; c += 128) copy_ahead(row + c, from + i * bytes + c, true);
      else
        for (int c = (lane & 7) * 4; c < bytes; c += 32) *(u32*)(row + c) = *(const u32*)(from + i * bytes + c);
    }
  }
}

// The scores of a warp's 16 keys: lanes 2i and 2i+1 have key i, for each of G queries q[G][width].
template <int G>
__device__ __forceinline__ void score_keys(
    const AttentionArgs& a, const Page& page, const float* q, int width, int lane, float* score) {
  const char* key = page.key(lane >> 1);
  const int d = (int)a.d;
  for (int g = 0; g < G; ++g) score[g] = 0.f;
#pragma unroll 4
  for (int c = (lane & 1) * 8; c < d; c += 16) {
    float k[8];
    if (c + 8 <= d && a.bf16) {
      const uint4 w = *(const uint4*)(key + c * 2);
      k[0] = float_of(w.x & 0xffffu); k[1] = float_of(w.x >> 16); k[2] = float_of(w.y & 0xffffu); k[3] = float_of(w.y >> 16);
      k[4] = float_of(w.z & 0xffffu); k[5] = float_of(w.z >> 16); k[6] = float_of(w.w & 0xffffu); k[7] = float_of(w.w >> 16);
    } else if (c + 8 <= d) {
      const float4 w = *(const float4*)(key + c * 4), v = *(const float4*)(key + c * 4 + 16);
      k[0] = w.x; k[1] = w.y; k[2] = w.z; k[3] = w.w; k[4] = v.x; k[5] = v.y; k[6] = v.z; k[7] = v.w;
    } else {
      for (int i = 0; i < 8; ++i)
        k[i] = c + i >= d ? 0.f : a.bf16 ? float_of(((const u16*)key)[c + i]) : ((const float*)key)[c + i];
    }
    for (int g = 0; g < G; ++g) {
      const float4 x = *(const float4*)(q + g * width + c), y = *(const float4*)(q + g * width + c + 4);
      float s = score[g];
      s = __fmaf_rn(x.x, k[0], s); s = __fmaf_rn(x.y, k[1], s); s = __fmaf_rn(x.z, k[2], s); s = __fmaf_rn(x.w, k[3], s);
      s = __fmaf_rn(y.x, k[4], s); s = __fmaf_rn(y.y, k[5], s); s = __fmaf_rn(y.z, k[6], s); s = __fmaf_rn(y.w, k[7], s);
      score[g] = s;
    }
  }
  for (int g = 0; g < G; ++g) {
    float s = __fmul_rn(score[g] + __shfl_xor_sync(0xffffffffu, score[g], 1), (float)a.scale);
    if (a.softcap > 0) s = (float)a.softcap * tanhf(s / (float)a.softcap);
    score[g] = s;
  }
}

// Where the warps of a block leave what their pages add up to.
struct Room {
  float* values;   // [warp][G][dim]
  float* most;     // [warp][G]
  float* total;    // [warp][G]
  float* weights;  // [warp][16][G]
};

template <int G, int PAIRS>
__device__ __forceinline__ void attend_page(
    const AttentionArgs& a, const Page& page, const float* q, int width, i64 first, i64 lo, i64 hi, const Room& room) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float score[G];
  score_keys<G>(a, page, q, width, lane, score);
  const i64 at = first + (lane >> 1);
  const bool seen = at >= lo && at < hi;
  float* weights = room.weights + warp * 16 * G;
  for (int g = 0; g < G; ++g) {
    float top = seen ? score[g] : NEGATIVE;
    for (int o = 16; o > 1; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    const float weight = seen ? expf(score[g] - top) : 0.f;
    float sum = weight;
    for (int o = 16; o > 1; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane == 0) { room.most[warp * G + g] = top; room.total[warp * G + g] = sum; }
    if (!(lane & 1)) weights[(lane >> 1) * G + g] = a.rounded ? float_of(bf16_of(weight)) : weight;
  }
  __syncwarp();
  float out[G][PAIRS][2];
  for (int g = 0; g < G; ++g) for (int p = 0; p < PAIRS; ++p) out[g][p][0] = out[g][p][1] = 0.f;
  const int begin = lo > first ? (int)(lo - first) : 0, end = hi - first < 16 ? (int)(hi - first) : 16;
#pragma unroll 4
  for (int i = begin; i < end; ++i) {
    float weight[G];
    for (int g = 0; g < G; ++g) weight[g] = weights[i * G + g];
    for (int p = 0; p < PAIRS; ++p) {
      const int d = 2 * lane + 64 * p;
      if (d >= a.dv) continue;
      float v0, v1;
      if (a.bf16) {
        const u32 both = *(const u32*)(page.value(i) + d * 2);
        v0 = float_of(both & 0xffffu); v1 = float_of(both >> 16);
      } else {
        const float2 both = *(const float2*)(page.value(i) + d * 4);
        v0 = both.x; v1 = both.y;
      }
      for (int g = 0; g < G; ++g) {
        out[g][p][0] = __fmaf_rn(weight[g], v0, out[g][p][0]);
        out[g][p][1] = __fmaf_rn(weight[g], v1, out[g][p][1]);
      }
    }
  }
  float* values = room.values + warp * G * a.dim;
  for (int g = 0; g < G; ++g)
    for (int p = 0; p < PAIRS; ++p) {
      const int d = 2 * lane + 64 * p;
      if (d < a.dv) { values[g * a.dim + d] = out[g][p][0]; values[g * a.dim + d + 1] = out[g][p][1]; }
    }
}

// One element's sum so far: of weighted values, with the largest score and the sum of weights of its query.
struct Sum {
  float most, total, value;
};

__device__ __forceinline__ void add(Sum& s, const Sum& more) {
  const float top = fmaxf(s.most, more.most);
  const float mine = s.most > NEGATIVE ? power(s.most - top) : 0.f;
  const float theirs = more.most > NEGATIVE ? power(more.most - top) : 0.f;
  s.most = top;
  s.total = __fadd_rn(__fmul_rn(s.total, mine), __fmul_rn(more.total, theirs));
  s.value = __fadd_rn(__fmul_rn(s.value, mine), __fmul_rn(more.value, theirs));
}

// A range's sum for element (g, d), from its warps in order.
template <int G>
__device__ __forceinline__ Sum join_warps(const AttentionArgs& a, const Room& room, int warps, int g, int d) {
  float most[4], total[4], value[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int from = w < warps ? w : 0;
    most[w] = w < warps ? room.most[from * G + g] : NEGATIVE;
    total[w] = room.total[from * G + g];
    value[w] = room.values[(from * G + g) * (int)a.dim + d];
  }
  Sum s{fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])), 0.f, 0.f};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float by = most[w] > NEGATIVE ? power(most[w] - s.most) : 0.f;
    s.total = most[w] > NEGATIVE ? __fmaf_rn(total[w], by, s.total) : s.total;
    s.value = most[w] > NEGATIVE ? __fmaf_rn(value[w], by, s.value) : s.value;
  }
  return s;
}

__device__ __forceinline__ int pitch_of(const AttentionArgs& a) {
  return ((int)a.dim * (a.bf16 ? 2 : 4) + 127) / 128 * 128 + 32;
}

template <int G, int PAIRS>
__device__ __forceinline__ void attention(const AttentionArgs& a) {
  constexpr int AHEAD = G * PAIRS > 8 ? 2 : 5;  // ranges whose sums are on their way when they are merged
  SHARED_BYTES(shared);
  let_others_start();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x / 32;
  const int width = 64 * PAIRS, threads = blockDim.x, elements = G * (int)a.dv;
  const Page page{shared + warp * 32 * pitch_of(a), pitch_of(a)};
  float* q = (float*)(shared + warps * 32 * pitch_of(a));
  const int shift = warps == 4 ? 6 : 5, dv = (int)a.dv;  // keys = 1 << shift
  Room room;
  room.values = q + G * width;
  room.most = room.values + warps * G * a.dim;
  room.total = room.most + warps * G;
  room.weights = room.total + warps * G;
  int* is_last = (int*)(room.weights + warps * 16 * G);
  // the step's inputs are there before this kernel may start (see `pull`): asked for together, they come together
  const i64 t = blockIdx.x, rows = from_host(a.rows), stride = from_host(a.page_stride);
  const int mine = from_host(a.seq + t);
  const i64 own = from_host(a.positions + t);
  i64 hi = own + 1, fresh = own;
  if (gridDim.x > 1 && (a.split || !a.causal)) {
    for (i64 i = lane; i < gridDim.x; i += 32) {
      const i64 p = from_host(a.positions + i);
      if (from_host(a.seq + i) != mine || i >= rows) continue;
      fresh = p < fresh ? p : fresh;
      if (!a.causal && p + 1 > hi) hi = p + 1;
    }
    for (int o = 16; o; o >>= 1) {
      const int p = __shfl_xor_sync(0xffffffffu, (int)fresh, o), end = __shfl_xor_sync(0xffffffffu, (int)hi, o);
      fresh = p < fresh ? p : fresh;
      hi = end > hi ? end : hi;
    }
  }
  const int group = (int)a.heads / (int)a.kv_heads, batches = group / G;
  const int head = (int)blockIdx.y / batches, first_q = head * group + (int)blockIdx.y % batches * G;
  const i64 lo = a.window > 0 && own + 1 > a.window ? own + 1 - a.window : 0;
  const i64 from = lo >> shift, ranges = (hi + (1 << shift) - 1) >> shift;
  i64 r = a.split ? from + blockIdx.z : from;
  if (t >= rows || r >= ranges) { after_others(); return; }
  const int* table = a.pages + mine * stride;
  auto wanted = [&](i64 first) { return first < hi && first + 16 > lo; };
  i64 first = (r << shift) + warp * 16;
  const bool early = a.split && first + 16 <= fresh;
  if (early && wanted(first)) copy_page(a, page, from_host(table + (first >> 4)), head, lane);
  after_others();
#pragma unroll
  for (int i = threadIdx.x; i < G * width; i += threads) {
    const int g = i / (64 * PAIRS), d = i % (64 * PAIRS);
    const float v = d < a.d ? a.q[t * a.q_stride + (first_q + g) * a.d + d] : 0.f;
    q[i] = a.rounded ? float_of(bf16_of(v)) : v;
  }
  constexpr int SLOTS = PAIRS < 4 ? (G * PAIRS + 1) / 2 : G * PAIRS;  // wide heads may have two warps
  Sum all[SLOTS];  // of elements (g, d): a thread's number i is number threadIdx.x + threads·i
  int query[SLOTS], channel[SLOTS];
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    all[i] = Sum{NEGATIVE, 0.f, 0.f};
    const int at = threadIdx.x + threads * i;
    query[i] = at < elements ? at / dv : -1;
    channel[i] = at - query[i] * dv;
  }
  for (; r < ranges; ++r) {
    first = (r << shift) + warp * 16;
    if (wanted(first) && !early) copy_page(a, page, from_host(table + (first >> 4)), head, lane);
    copies_end();
    copies_but<0>();
    __syncthreads();
    if (wanted(first)) attend_page<G, PAIRS>(a, page, q, width, first, lo, hi, room);
    else if (lane < G) room.most[warp * G + lane] = NEGATIVE;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      if (query[i] < 0) break;
      const Sum s = join_warps<G>(a, room, warps, query[i], channel[i]);
      if (a.split) all[i] = s;
      else add(all[i], s);
    }
    if (a.split) break;
    __syncthreads();
  }
  if (a.split && ranges - from > 1) {
    const i64 pitch = a.dim + 2, cell = t * gridDim.y + blockIdx.y, many = ranges - from;
    float* parts = a.parts + cell * gridDim.z * G * pitch;
    float* left = parts + (i64)blockIdx.z * G * pitch;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const int g = query[i], d = channel[i];
      if (g < 0) break;
      left[g * pitch + d] = all[i].value;
      if (d == 0) { left[g * pitch + a.dim] = all[i].most; left[g * pitch + a.dim + 1] = all[i].total; }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *is_last = atomicAdd(a.through + cell, 1) == (int)many - 1;
    __syncthreads();
    if (!*is_last) return;
    __threadfence();
    // every load of some ranges is on its way before the first is waited for
    const float *value[SLOTS], *most[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const int g = query[i] < 0 ? 0 : query[i];
      value[i] = parts + g * pitch + (query[i] < 0 ? 0 : channel[i]);
      most[i] = parts + g * pitch + a.dim;
      all[i] = Sum{NEGATIVE, 0.f, 0.f};
    }
    for (i64 n = 0; n < many; n += AHEAD) {
      Sum next[AHEAD][SLOTS];
#pragma unroll
      for (int e = 0; e < AHEAD; ++e) {
        const i64 skip = (n + e < many ? n + e : n) * G * pitch;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i)
          next[e][i] = Sum{from_others(most[i] + skip), from_others(most[i] + skip + 1), from_others(value[i] + skip)};
      }
#pragma unroll
      for (int e = 0; e < AHEAD; ++e)
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) if (n + e < many) add(all[i], next[e][i]);
    }
    if (threadIdx.x == 0) a.through[cell] = 0;
  }
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    const int g = query[i], d = channel[i];
    if (g < 0) break;
    Sum s = all[i];
    if (a.sinks) {
      const float sink = a.sinks[first_q + g], top = fmaxf(s.most, sink), by = expf(s.most - top);
      s.value = __fmul_rn(s.value, by);
      s.total = __fadd_rn(__fmul_rn(s.total, by), expf(sink - top));
    }
    const float v = __fdiv_rn(s.value, s.total);
    const i64 to = t * a.y_stride + (first_q + g) * dv + d;
    if (a.y_bf16) ((u16*)a.y)[to] = (u16)bf16_of(v);
    else a.y[to] = v;
  }
}

#define ATTENTION(g, pairs) \
  extern "C" __global__ void __launch_bounds__(128) attention_##g##_##pairs(AttentionArgs a) { attention<g, pairs>(a); }

ATTENTION(1, 1) ATTENTION(2, 1) ATTENTION(4, 1)
ATTENTION(1, 2) ATTENTION(2, 2) ATTENTION(4, 2)
ATTENTION(1, 4) ATTENTION(2, 4) ATTENTION(4, 4)
