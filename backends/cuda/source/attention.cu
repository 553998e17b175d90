// Paged attention, and what stands in front of it.

// Rotates queries and keys of a token and writes keys and values into the cache: a warp for each token and head. Any of
// the three parts may be missing (0 heads).
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
  const i64* page_stride;
  i64 late;            // positions, seq or pages are no inputs of the step: others may still be at work on them
  const i64* rows;
};

// Channel i of a head, rotated.
__device__ __forceinline__ float rotated(const float* x, int i, const float* table, int half) {
  const float v = x[i];
  if (i >= 2 * half) return v;
  const int r = i < half ? i : i - half;
  const float near = __fmul_rn(v, table[r]), far = __fmul_rn(x[i < half ? i + half : r], table[half + r]);
  return i < half ? __fsub_rn(near, far) : __fadd_rn(near, far);
}

__device__ __forceinline__ void put(char* kv, i64 at, float v, i64 bf16) {
  if (bf16) ((u16*)kv)[at] = (u16)bf16_of(v);
  else ((float*)kv)[at] = v;
}

// Where a head of a token comes from and goes to; everything but x and the table is known before them.
struct Turned {
  const float *x, *table;  // table 0: not rotated
  float* y;                // 0: only into the cache
  i64 entry, width;        // entry: of the cache, or -1

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
    table = (is_q || is_k) && a.table ? a.table + t * a.table_stride : (const float*)0;
  }

  __device__ __forceinline__ void write(const RopeArgs& a, int i, float v) const {
    if (y) y[i] = v;
    if (entry >= 0) put(a.kv, entry + i, v, a.bf16);
  }

  __device__ __forceinline__ void run(const RopeArgs& a, int lane) const {
    const int half = table ? (int)a.half : 0;
#pragma unroll 2
    for (int i = lane; i < half; i += 32) {
      const float first = rotated(x, i, table, half), second = rotated(x, half + i, table, half);
      write(a, i, first);
      write(a, half + i, second);
    }
#pragma unroll 4
    for (int i = 2 * half + lane; i < width; i += 32) write(a, i, x[i]);
  }
};

extern "C" __global__ void rope(RopeArgs a) {
  let_others_start();
  if (a.late) after_others();
  const i64 t = blockIdx.x, number = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
  if (t >= from_host(a.rows) || number >= a.heads + a.k_heads + a.v_heads) { after_others(); return; }
  const Turned head(a, t, number);
  after_others();
  head.run(a, threadIdx.x & 31);
}

// A warp's page in shared memory: 16 keys, then 16 values. A row is padded so that four of them lie in
// different banks.
struct Page {
  char* at;
  int pitch;  // bytes
  __device__ __forceinline__ const char* key(int i) const { return at + i * pitch; }
  __device__ __forceinline__ const char* value(int i) const { return at + (16 + i) * pitch; }
};

// One of PARTS warps' rows of a page, but row `skip` (-1: all).
template <int PARTS>
__device__ __forceinline__ void copy_page(
    const AttentionArgs& a, const Page& to, int page, int head, int part, int skip, int lane) {
  const int bytes = (int)a.dim * (a.bf16 ? 2 : 4);
#pragma unroll
  for (int n = 0; n < 8 / PARTS; ++n) {
    const int which = n & 1, i = 4 * (part + PARTS * (n >> 1)) + (lane >> 3);
    if (i == skip) continue;
    const char* from = a.kv + ((((i64)page * 2 + which) * (int)a.kv_heads + head) * 16 + i) * bytes;
    char* row = to.at + (which * 16 + i) * to.pitch;
    if (bytes % 16 == 0)
#pragma unroll 2
      for (int c = (lane & 7) * 16; c < bytes; c += 128) copy_ahead(row + c, from + c, true);
    else
#pragma unroll 1
      for (int c = (lane & 7) * 4; c < bytes; c += 32) *(u32*)(row + c) = *(const u32*)(from + c);
  }
}

// Adds the products of eight channels of a key with Q queries q[Q][width].
template <int Q>
__device__ __forceinline__ void multiply8(const float* k, const float* q, int width, float* score) {
  for (int g = 0; g < Q; ++g) {
    const float4 x = *(const float4*)(q + g * width), y = *(const float4*)(q + g * width + 4);
    float s = score[g];
    s = __fmaf_rn(x.x, k[0], s); s = __fmaf_rn(x.y, k[1], s); s = __fmaf_rn(x.z, k[2], s); s = __fmaf_rn(x.w, k[3], s);
    s = __fmaf_rn(y.x, k[4], s); s = __fmaf_rn(y.y, k[5], s); s = __fmaf_rn(y.z, k[6], s); s = __fmaf_rn(y.w, k[7], s);
    score[g] = s;
  }
}

// The products of a warp's 16 keys: lanes 2i and 2i+1 have every other eight channels of key i.
template <int Q, int AT_ONCE, bool BF16>
__device__ __forceinline__ void multiply_keys(const char* key, const float* q, int width, int d, int lane, float* score) {
  const int half = (lane & 1) * 8, whole = d & ~15;
#pragma unroll AT_ONCE
  for (int c = half; c < whole + half; c += 16) {
    float k[8];
    if (BF16) {
      const uint4 w = *(const uint4*)(key + c * 2);
      k[0] = float_of(w.x & 0xffffu); k[1] = float_of(w.x >> 16); k[2] = float_of(w.y & 0xffffu); k[3] = float_of(w.y >> 16);
      k[4] = float_of(w.z & 0xffffu); k[5] = float_of(w.z >> 16); k[6] = float_of(w.w & 0xffffu); k[7] = float_of(w.w >> 16);
    } else {
      const float4 w = *(const float4*)(key + c * 4), v = *(const float4*)(key + c * 4 + 16);
      k[0] = w.x; k[1] = w.y; k[2] = w.z; k[3] = w.w; k[4] = v.x; k[5] = v.y; k[6] = v.z; k[7] = v.w;
    }
    multiply8<Q>(k, q + c, width, score);
  }
  const int c = whole + half;
  if (c >= d) return;
  float k[8];
  for (int i = 0; i < 8; ++i)
    k[i] = c + i >= d ? 0.f : BF16 ? float_of(((const u16*)key)[c + i]) : ((const float*)key)[c + i];
  multiply8<Q>(k, q + c, width, score);
}

template <int Q, int AT_ONCE>
__device__ __forceinline__ void score_keys(
    const AttentionArgs& a, const Page& page, const float* q, int width, int lane, float* score) {
  const char* key = page.key(lane >> 1);
  for (int g = 0; g < Q; ++g) score[g] = 0.f;
  if (a.bf16) multiply_keys<Q, AT_ONCE, true>(key, q, width, (int)a.d, lane, score);
  else multiply_keys<Q, AT_ONCE, false>(key, q, width, (int)a.d, lane, score);
  const float scale = (float)a.scale, cap = (float)a.softcap;
  for (int g = 0; g < Q; ++g) score[g] = __fmul_rn(score[g] + __shfl_xor_sync(0xffffffffu, score[g], 1), scale);
  if (cap > 0.f)
    for (int g = 0; g < Q; ++g) score[g] = cap * tanhf(score[g] / cap);
}

// Where the warps of a block leave what their pages add up to.
struct Room {
  float* values;   // [page][G][dim]
  float* most;     // [page][G]
  float* total;    // [page][G]
  float* weights;  // [warp][16][Q]
};

// Weighted values of a warp's page, added up: channels 2·lane and 2·lane + 1 of each 64.
template <int Q, int PAIRS, int AT_ONCE, bool BF16>
__device__ __forceinline__ void add_values(
    const Page& page, const float* weights, int begin, int end, int dv, int lane, float (*out)[PAIRS][2]) {
#pragma unroll AT_ONCE
  for (int i = begin; i < end; ++i) {
    float weight[Q];
    for (int g = 0; g < Q; ++g) weight[g] = weights[i * Q + g];
    for (int p = 0; p < PAIRS; ++p) {
      const int d = 2 * lane + 64 * p;
      if (d >= dv) continue;
      float v0, v1;
      if (BF16) {
        const u32 both = *(const u32*)(page.value(i) + d * 2);
        v0 = float_of(both & 0xffffu); v1 = float_of(both >> 16);
      } else {
        const float2 both = *(const float2*)(page.value(i) + d * 4);
        v0 = both.x; v1 = both.y;
      }
      for (int g = 0; g < Q; ++g) {
        out[g][p][0] = __fmaf_rn(weight[g], v0, out[g][p][0]);
        out[g][p][1] = __fmaf_rn(weight[g], v1, out[g][p][1]);
      }
    }
  }
}

// A warp's page, `at` in the block, with Q of its G queries, from `query` on. first: the page's first key.
template <int G, int Q, int PAIRS>
__device__ __forceinline__ void attend_page(
    const AttentionArgs& a, const Page& page, const float* q, int at, int query, int first, int lo, int hi,
    const Room& room) {
  constexpr int WIDTH = 64 * PAIRS, AT_ONCE = Q * PAIRS > 8 ? 2 : 4;  // wide heads have no registers to spare
  const int lane = threadIdx.x & 31, dim = (int)a.dim, dv = (int)a.dv;
  float score[Q];
  score_keys<Q, AT_ONCE>(a, page, q + query * WIDTH, WIDTH, lane, score);
  const int key = lane >> 1, begin = lo > first ? lo - first : 0, end = hi - first < 16 ? hi - first : 16;
  const bool seen = key >= begin && key < end;
  float* weights = room.weights + (threadIdx.x >> 5) * 16 * Q;
  for (int g = 0; g < Q; ++g) {
    float top = seen ? score[g] : NEGATIVE;
    for (int o = 16; o > 1; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    const float weight = seen ? expf(score[g] - top) : 0.f;
    float sum = weight;
    for (int o = 16; o > 1; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane == 0) { room.most[at * G + query + g] = top; room.total[at * G + query + g] = sum; }
    if (!(lane & 1)) weights[key * Q + g] = a.rounded ? float_of(bf16_of(weight)) : weight;
  }
  __syncwarp();
  float out[Q][PAIRS][2];
  for (int g = 0; g < Q; ++g) for (int p = 0; p < PAIRS; ++p) out[g][p][0] = out[g][p][1] = 0.f;
  if (a.bf16) add_values<Q, PAIRS, AT_ONCE, true>(page, weights, begin, end, dv, lane, out);
  else add_values<Q, PAIRS, AT_ONCE, false>(page, weights, begin, end, dv, lane, out);
  float* values = room.values + (at * G + query) * dim;
  for (int g = 0; g < Q; ++g)
    for (int p = 0; p < PAIRS; ++p) {
      const int d = 2 * lane + 64 * p;
      if (d < dv) { values[g * dim + d] = out[g][p][0]; values[g * dim + d + 1] = out[g][p][1]; }
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

// A range's sum for element (g, d), from its pages in order.
template <int G>
__device__ __forceinline__ Sum join_pages(const AttentionArgs& a, const Room& room, int pages, int g, int d) {
  float most[4], total[4], value[4];
  const float* values = room.values + g * (int)a.dim + d;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int from = w < pages ? w : 0;
    most[w] = w < pages ? room.most[from * G + g] : NEGATIVE;
    total[w] = room.total[from * G + g];
    value[w] = values[from * G * (int)a.dim];
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

// Merges the ranges that other blocks left in parts[range][G][dim + 2], each element as `add` does it: first what the
// sums so far and each range's are multiplied by, a warp a query and 32 ranges at a time. factors: shared [32][G].
template <int G, int PAIRS, int SLOTS>
__device__ __forceinline__ void merge_ranges(
    const AttentionArgs& a, const float* parts, int many, float4* factors, const int* query, const int* channel, Sum* all) {
  constexpr int AHEAD = 16 / SLOTS;  // ranges whose sums are on their way together
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, dim = (int)a.dim, pitch = G * (dim + 2);
  const float* element[SLOTS];
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    element[i] = parts + (query[i] < 0 ? 0 : query[i] * (dim + 2) + channel[i]);
    all[i] = Sum{NEGATIVE, 0.f, 0.f};
  }
  float most = NEGATIVE;  // of a warp's query, so far
  for (int n = 0; n < many; n += 32) {
    const int end = many - n < 32 ? many - n : 32;
    float value[AHEAD][SLOTS];
    auto load = [&](int from) {
#pragma unroll
      for (int e = 0; e < AHEAD; ++e)
#pragma unroll
        for (int i = 0; i < SLOTS; ++i)
          value[e][i] = from + e < end ? from_others(element[i] + (i64)(n + from + e) * pitch) : 0.f;
    };
    load(0);
    if (warp < G) {
      const float* range = parts + (i64)(n + (lane < end ? lane : 0)) * pitch + warp * (dim + 2) + dim;
      const float mine = lane < end ? from_others(range) : NEGATIVE, total = from_others(range + 1);
      float top = fmaxf(most, mine);
      for (int o = 1; o < 32; o <<= 1) {
        const float other = __shfl_sync(0xffffffffu, top, (lane - o) & 31);
        if (lane >= o) top = fmaxf(top, other);
      }
      float before = __shfl_sync(0xffffffffu, top, (lane - 1) & 31);
      if (lane == 0) before = most;
      factors[lane * G + warp] = float4{before > NEGATIVE ? power(before - top) : 0.f,
                                        mine > NEGATIVE ? power(mine - top) : 0.f, total, top};
      most = __shfl_sync(0xffffffffu, top, 31);
    }
    __syncthreads();
    for (int from = 0; from < end; from += AHEAD) {
      if (from) load(from);
#pragma unroll
      for (int e = 0; e < AHEAD; ++e) {
        if (from + e >= end) break;
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
          const float4 f = factors[(from + e) * G + (query[i] < 0 ? 0 : query[i])];
          all[i].most = f.w;
          all[i].total = __fadd_rn(__fmul_rn(all[i].total, f.x), __fmul_rn(f.z, f.y));
          all[i].value = __fadd_rn(__fmul_rn(all[i].value, f.x), __fmul_rn(value[e][i], f.y));
        }
      }
    }
    if (n + 32 < many) __syncthreads();
  }
}

// A block takes a range of keys of one token and one key head, 4 pages of 16 (2 of very wide heads); ranges are
// merged in order. Where few tokens leave the device idle every range has a block of its own with a warp for each
// page and query, and the last block that is through merges them; else a warp has a page and all queries, and one
// block takes range after range: the same sums in the same order. Pages that no token of this step writes are read
// while the kernel before still runs. One token alone may be rotated and written into the cache here (`k`).
// FEW: every range has a block of its own.
template <int G, int PAIRS, bool FEW>
__device__ __forceinline__ void attention(const AttentionArgs& a) {
  constexpr int Q = FEW ? 1 : G, PARTS = G / Q, WIDTH = 64 * PAIRS;
  constexpr int THREADS = (PAIRS < 4 ? 128 : 64) * PARTS;  // at least: wide heads may have two pages
  constexpr int SLOTS = (G * WIDTH + THREADS - 1) / THREADS;
  SHARED_BYTES(shared);
  let_others_start();
  if (a.late) after_others();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, threads = PAIRS < 4 ? THREADS : blockDim.x;
  const int pages = threads / (32 * PARTS), shift = pages == 4 ? 6 : 5;  // keys = 1 << shift
  const int at = warp & (pages - 1), part = FEW ? warp >> (shift - 4) : 0, dv = (int)a.dv, d = (int)a.d;
  const Page page{shared + at * 32 * pitch_of(a), pitch_of(a)};
  float* q = (float*)(shared + pages * 32 * pitch_of(a));
  Room room;
  room.values = q + G * WIDTH;
  room.most = room.values + pages * G * (int)a.dim;
  room.total = room.most + pages * G;
  room.weights = room.total + pages * G;
  int* is_last = (int*)(room.weights + pages * 16 * G);
  // inputs of the step are there before this kernel may start (see `pull`): asked for together, they come together
  const int t = blockIdx.x, rows = (int)from_host(a.rows), stride = (int)from_host(a.page_stride);
  const int mine = from_host(a.seq + t), own = from_host(a.positions + t);
  int hi = own + 1, fresh = own;
  if (gridDim.x > 1 && (FEW || !a.causal)) {
    for (int i = lane; i < gridDim.x; i += 32) {
      const int p = from_host(a.positions + i);
      if (from_host(a.seq + i) != mine || i >= rows) continue;
      fresh = p < fresh ? p : fresh;
      if (!a.causal && p + 1 > hi) hi = p + 1;
    }
    for (int o = 16; o; o >>= 1) {
      const int p = __shfl_xor_sync(0xffffffffu, fresh, o), end = __shfl_xor_sync(0xffffffffu, hi, o);
      fresh = p < fresh ? p : fresh;
      hi = end > hi ? end : hi;
    }
  }
  const int group = (int)a.heads / (int)a.kv_heads, batches = group / G;
  const int head = (int)blockIdx.y / batches, batch = (int)blockIdx.y % batches, first_q = head * group + batch * G;
  const int lo = a.window > 0 && own + 1 > a.window ? own + 1 - (int)a.window : 0;
  const int from = lo >> shift, ranges = (hi + (1 << shift) - 1) >> shift;
  int r = FEW ? from + (int)blockIdx.z : from;
  if (t >= rows) { after_others(); return; }
  if (r >= ranges) return;  // a token's first range waits
  const int* table = a.pages + (i64)mine * stride;
  auto wanted = [&](int first) { return first < hi && first + 16 > lo; };
  int first = (r << shift) + at * 16;
  const bool turns = FEW && a.k, brings = turns && r == own >> shift;
  const int skip = turns && first >> 4 == own >> 4 ? own & 15 : -1;  // the only row that isn't in the cache yet
  const int own_page = brings ? from_host(table + (own >> 4)) : 0;
  if (FEW) {
    const int page_at = wanted(first) ? from_host(table + (first >> 4)) : 0;
    if (!turns && first + 16 > fresh) after_others();
    if (wanted(first)) copy_page<PARTS>(a, page, page_at, head, part, skip, lane);
  }
  after_others();
  if (turns) {  // queries, then key and value, each WIDTH wide; all are on their way before the first is used
    constexpr int TAKEN = ((G + 2) * WIDTH + THREADS - 1) / THREADS;
    float x[TAKEN];
#pragma unroll
    for (int i = 0; i < TAKEN; ++i) {
      const int what = (threadIdx.x + threads * i) / WIDTH, c = threadIdx.x + threads * i - what * WIDTH;
      x[i] = 0.f;
      if (what < G && c < d) x[i] = rotated(a.q + (first_q + what) * d, c, a.table, (int)a.half);
      else if (what == G && c < d && brings) x[i] = rotated(a.k + head * d, c, a.table, (int)a.half);
      else if (what == G + 1 && c < dv && brings) x[i] = a.v[head * dv + c];
    }
    char* row = shared + ((own >> 4 & (pages - 1)) * 32 + (own & 15)) * page.pitch;
    const i64 entry = (((i64)own_page * 2 * (int)a.kv_heads + head) * 16 + (own & 15)) * (int)a.dim;
#pragma unroll
    for (int i = 0; i < TAKEN; ++i) {
      const int what = (threadIdx.x + threads * i) / WIDTH, c = threadIdx.x + threads * i - what * WIDTH;
      if (what < G) q[what * WIDTH + c] = a.rounded ? float_of(bf16_of(x[i])) : x[i];
      else if (what < G + 2 && brings && c < (what == G ? d : dv)) {
        put(row + (what - G) * 16 * page.pitch, c, x[i], a.bf16);
        if (batch == 0) put(a.kv, entry + (what - G) * (int)(a.kv_heads * 16 * a.dim) + c, x[i], a.bf16);
      }
    }
  } else {
#pragma unroll
    for (int i = threadIdx.x; i < G * WIDTH; i += threads) {
      const int g = i / WIDTH, c = i % WIDTH;
      const float v = c < d ? a.q[(i64)t * a.q_stride + (first_q + g) * d + c] : 0.f;
      q[i] = a.rounded ? float_of(bf16_of(v)) : v;
    }
  }
  Sum all[SLOTS];  // of elements (query, channel); query -1: none
  int query[SLOTS], channel[SLOTS];
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    all[i] = Sum{NEGATIVE, 0.f, 0.f};
    query[i] = (threadIdx.x + threads * i) / WIDTH;
    channel[i] = (threadIdx.x + threads * i) % WIDTH;
    if (query[i] >= G || channel[i] >= dv) query[i] = -1;
  }
  for (; r < ranges; ++r) {
    first = (r << shift) + at * 16;
    if (!FEW && wanted(first)) copy_page<PARTS>(a, page, from_host(table + (first >> 4)), head, part, -1, lane);
    copies_end();
    copies_but<0>();
    __syncthreads();
    if (wanted(first)) attend_page<G, Q, PAIRS>(a, page, q, at, part * Q, first, lo, hi, room);
    else if (lane < Q) room.most[at * G + part * Q + lane] = NEGATIVE;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      if (query[i] < 0) continue;
      const Sum s = join_pages<G>(a, room, pages, query[i], channel[i]);
      if (FEW) all[i] = s;
      else add(all[i], s);
    }
    if (FEW) break;
    __syncthreads();
  }
  if (FEW && ranges - from > 1) {
    const int pitch = (int)a.dim + 2, many = ranges - from, cell = t * gridDim.y + blockIdx.y;
    float* parts = a.parts + (i64)cell * gridDim.z * G * pitch;
    float* left = parts + (i64)blockIdx.z * G * pitch;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const int g = query[i], c = channel[i];
      if (g < 0) continue;
      left[g * pitch + c] = all[i].value;
      if (c == 0) { left[(g + 1) * pitch - 2] = all[i].most; left[(g + 1) * pitch - 1] = all[i].total; }
    }
    __syncthreads();
    if (threadIdx.x == 0) *is_last = count_in(a.through + cell) == many - 1;
    __syncthreads();
    if (!*is_last) return;
    merge_ranges<G, PAIRS, SLOTS>(a, parts, many, (float4*)shared, query, channel, all);
    if (threadIdx.x == 0) a.through[cell] = 0;
  }
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    const int g = query[i], c = channel[i];
    if (g < 0) continue;
    Sum s = all[i];
    if (a.sinks) {
      const float sink = a.sinks[first_q + g], top = fmaxf(s.most, sink), by = expf(s.most - top);
      s.value = __fmul_rn(s.value, by);
      s.total = __fadd_rn(__fmul_rn(s.total, by), expf(sink - top));
    }
    const float v = __fdiv_rn(s.value, s.total);
    put_one(a.y, t, (first_q + g) * dv + c, a.y_stride, a.y_as, v);
  }
}

#define ATTENTION(g, pairs) \
  extern "C" __global__ void __launch_bounds__(128) attention_##g##_##pairs(AttentionArgs a) { \
    attention<g, pairs, false>(a); \
  } \
  extern "C" __global__ void __launch_bounds__(128 * g) attention_few_##g##_##pairs(AttentionArgs a) { \
    attention<g, pairs, true>(a); \
  }

ATTENTION(1, 1) ATTENTION(2, 1) ATTENTION(4, 1)
ATTENTION(1, 2) ATTENTION(2, 2) ATTENTION(4, 2)
ATTENTION(1, 4) ATTENTION(2, 4) ATTENTION(4, 4)
