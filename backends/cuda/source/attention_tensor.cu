// Attention of many (token, key head) cells over a bf16 cache, queries and weights rounded to bf16: on tensor cores.
//
// A block has a token and up to eight queries of a key head. Its warps take pages of the context in turns and pass them
// through a ring in shared memory that each has for itself, keys and values one after the other: the next ones are on
// their way while one is multiplied. Warps meet when the queries are there, and at the end, where what they have is
// merged in order.
//
// Scores of a page are keys × queries, results channels × queries. So a lane has the same two queries in both, and what
// it knows of them (their largest score, the sum of their weights) never leaves it, but for the largest of 16 keys.

constexpr int READERS = 4;  // warps of a block
constexpr int QUERIES = 8;  // of a block, at most
constexpr int EARLY = 64;   // tokens of a step up to which pages are read before the kernel in front is through

template <int WIDTH>
constexpr int HALVES = WIDTH > 128 ? 2 : 3;  // of a page, in a warp's ring

// Where 16-byte chunk c of row r lies, of rows of WIDTH bf16: eight rows' chunks c share no bank.
template <int WIDTH>
__device__ __forceinline__ int chunk_at(int r, int c) {
  return r * 2 * WIDTH + (c >> 3) * 128 + (((c ^ r) & 7) << 4);
}

// The keys that a token sees, [lo, hi). Pages up to key `fresh` are not written in this step.
struct Seen {
  int lo, hi, fresh;
};

__device__ __forceinline__ Seen seen_by(const AttentionArgs& a, int mine, int own, int rows, int lane) {
  Seen s{a.window > 0 && own + 1 > a.window ? own + 1 - (int)a.window : 0, own + 1, own};
  const int bucket = (int)gridDim.x;
  if (a.causal && bucket > EARLY) return Seen{s.lo, s.hi, 0};
  for (int first = 0; first < bucket; first += 64)
#pragma unroll
    for (int e = 0; e < 64; e += 32) {  // two tokens' are on their way together
      const int at = first + e + lane, i = at < bucket ? at : (int)blockIdx.x;
      const int p = from_host(a.positions + i), same = from_host(a.seq + i) == mine && i < rows;
      s.fresh = same && p < s.fresh ? p : s.fresh;
      s.hi = same && !a.causal && p + 1 > s.hi ? p + 1 : s.hi;
    }
  for (int o = 16; o; o >>= 1) {
    const int fresh = __shfl_xor_sync(0xffffffffu, s.fresh, o), hi = __shfl_xor_sync(0xffffffffu, s.hi, o);
    s.fresh = fresh < s.fresh ? fresh : s.fresh;
    s.hi = hi > s.hi ? hi : s.hi;
  }
  return s;
}

// A warp's pages: every READERS'th, from page `from` on.
template <int WIDTH>
struct Reader {
  static constexpr int HALF = 16 * 2 * WIDTH;  // bytes: 16 keys, or values
  const AttentionArgs& a;
  Seen seen;
  int head, lane, from, count;
  const int* table;  // entries, from the warp's first one on
  char* ring;
  int even, odd;     // a lane's entry of each 32: the 1st, 3rd, …, and the 2nd, 4th, …
  int slot;          // of the ring, whose turn it is

  __device__ __forceinline__ int entry(int i) const { return i < count ? from_host(table + i * READERS) : 0; }
  __device__ __forceinline__ int first_key(int i) const { return (from + i * READERS) * 16; }
  __device__ __forceinline__ char* rows() const { return ring + slot * HALF; }

  // Begins to copy keys (0) or values (1) of page i; zeros for what isn't seen, which may be anything.
  __device__ __forceinline__ void copy(int i, int which, char* to) const {
    constexpr int CHUNKS = WIDTH / 8, ROWS = 32 / CHUNKS;  // of a row; that all lanes copy at once
    if (i < count) {
      const int page = __shfl_sync(0xffffffffu, i & 32 ? odd : even, i & 31), pitch = (int)a.dim * 2;
      const int r = lane / CHUNKS, c = lane % CHUNKS, seen_from = seen.lo - first_key(i), seen_to = seen.hi - first_key(i);
      const bool inside = c * 8 < (int)(which ? a.dv : a.d);
      const char* row = a.kv + ((((i64)page * 2 + which) * (int)a.kv_heads + head) * 16 + r) * pitch + c * 16;
#pragma unroll
      for (int k = 0; k < 16; k += ROWS, row += ROWS * pitch)
        copy_ahead(to + chunk_at<WIDTH>(r + k, c), row, inside && r + k >= seen_from && r + k < seen_to);
    }
    copies_end();
  }

  // Fills the ring; waits for the kernel in front if that may still write what is read.
  __device__ __forceinline__ void begin() {
    even = entry(lane);
#pragma unroll
    for (int n = 0; n < HALVES<WIDTH>; ++n) {
      if (n / 2 < count && first_key(n / 2) + 16 > seen.fresh) after_others();
      copy(n / 2, n % 2, ring + n * HALF);
    }
  }

  // Before a half that is due is read.
  __device__ __forceinline__ void wait() const {
    copies_but<HALVES<WIDTH> - 1>();
    __syncwarp();
  }

  // Behind it, `which` of page i: its place is for the half that comes HALVES later.
  __device__ __forceinline__ void next(int i, int which) {
    __syncwarp();
    copy(i + (which + HALVES<WIDTH>) / 2, (which + HALVES<WIDTH>) % 2, rows());
    slot = slot + 1 == HALVES<WIDTH> ? 0 : slot + 1;
  }

  // Entries are asked for long before their pages are.
  __device__ __forceinline__ void look_ahead(int i) {
    if (i % 32 != 15) return;
    if (i & 32) even = entry(i + 17 + lane);
    else odd = entry(i + 17 + lane);
  }
};

// What a warp has of its pages: of queries 2·(lane % 4) and the next one, and of channels lane / 4, + 8 of each 16.
template <int WIDTH>
struct Sums {
  float most[2], total[2];  // total: of the lane's own keys
  float out[WIDTH / 16][4];
};

// Scores of a page, from four products that a lane has: of keys lane / 4 and + 8. Then weights, as the second product
// takes them.
template <int WIDTH>
__device__ __forceinline__ void weigh(
    const AttentionArgs& a, const Seen& seen, int first, int lane, float* score, Sums<WIDTH>& sums, u32* weights) {
  const float scale = (float)a.scale, cap = (float)a.softcap;
  const int key = first + (lane >> 2);
  const bool in[2] = {key >= seen.lo && key < seen.hi, key + 8 >= seen.lo && key + 8 < seen.hi};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    score[i] = __fmul_rn(score[i], scale);
    if (cap > 0.f) score[i] = cap * tanhf(score[i] / cap);
    score[i] = in[i >> 1] ? score[i] : NEGATIVE;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float top = fmaxf(score[e], score[e + 2]);
    for (int o = 4; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    top = fmaxf(top, sums.most[e]);
    const float by = power(sums.most[e] - top);
    for (int i = e; i < 4; i += 2) score[i] = in[i >> 1] ? power(score[i] - top) : 0.f;
    sums.most[e] = top;
    sums.total[e] = sums.total[e] * by + (score[e] + score[e + 2]);
    for (int c = 0; c < WIDTH / 16; ++c) { sums.out[c][e] *= by; sums.out[c][e + 2] *= by; }
  }
  weights[0] = transposed(pair_of(score[0], score[1]));
  weights[1] = transposed(pair_of(score[2], score[3]));
}

// Queries as the first product takes them, by way of shared memory.
template <int WIDTH>
__device__ __forceinline__ void take_queries(const float* from, int count, int d, char* shared, u32 (*q)[2]) {
#pragma unroll
  for (int i = threadIdx.x; i < QUERIES * WIDTH / 2; i += 32 * READERS) {
    const int g = i / (WIDTH / 2), c = i % (WIDTH / 2) * 2;
    const bool in = g < count && c < d;
    const float x = in ? from[g * d + c] : 0.f, y = in ? from[g * d + c + 1] : 0.f;
    *(u32*)(shared + chunk_at<WIDTH>(g, c >> 3) + (c & 7) * 2) = pair_of(x, y);
  }
  __syncthreads();
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int c = 0; c < WIDTH / 16; c += 2) {
    u32 words[4];
    load_rows(words, shared + chunk_at<WIDTH>(lane & 7, 2 * c + (lane >> 3)));
    q[c][0] = words[0]; q[c][1] = words[1]; q[c + 1][0] = words[2]; q[c + 1][1] = words[3];
  }
}

template <int WIDTH>
__device__ __forceinline__ void add_pages(Reader<WIDTH>& pages, const u32 (*q)[2], Sums<WIDTH>& sums) {
  const int lane = pages.lane, low = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
#pragma unroll 1
  for (int i = 0; i < pages.count; ++i) {
    pages.look_ahead(i);
    pages.wait();
    float part[2][4] = {};
#pragma unroll
    for (int c = 0; c < WIDTH / 16; ++c) {
      u32 k[4];
      load_rows(k, pages.rows() + chunk_at<WIDTH>(low + second * 8, 2 * c + third));
      mma(part[c & 1], k[0], k[1], k[2], k[3], q[c][0], q[c][1]);
    }
    pages.next(i, 0);
    u32 weights[2];
    for (int e = 0; e < 4; ++e) part[0][e] += part[1][e];
    weigh<WIDTH>(pages.a, pages.seen, pages.first_key(i), lane, part[0], sums, weights);
    pages.wait();
#pragma unroll
    for (int c = 0; c < WIDTH / 16; ++c) {
      u32 v[4];
      load_columns(v, pages.rows() + chunk_at<WIDTH>(low + third * 8, 2 * c + second));
      mma(sums.out[c], v[0], v[1], v[2], v[3], weights[0], weights[1]);
    }
    pages.next(i, 1);
  }
}

// Merges what the warps have, in their order, and writes it. rings: as many bytes from warp to warp.
template <int WIDTH>
__device__ __forceinline__ void merge_readers(
    const AttentionArgs& a, const Sums<WIDTH>& sums, char* rings, int bytes, float* most, float* total, int t, int query,
    int count) {
  constexpr int PITCH = WIDTH + 4;  // of a query: lanes write to different banks
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
  float* own = (float*)(rings + warp * bytes);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int which = 2 * (lane & 3) + e;
    float sum = sums.total[e];
    for (int o = 4; o < 32; o <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (g == 0) { most[warp * QUERIES + which] = sums.most[e]; total[warp * QUERIES + which] = sum; }
    for (int c = 0; c < WIDTH / 16; ++c) {
      own[which * PITCH + c * 16 + g] = sums.out[c][e];
      own[which * PITCH + c * 16 + g + 8] = sums.out[c][e + 2];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * WIDTH; i += 32 * READERS) {
    const int which = i / WIDTH, c = i % WIDTH;
    if (c >= (int)a.dv) continue;
    float top = a.sinks ? a.sinks[query + which] : NEGATIVE;
    for (int w = 0; w < READERS; ++w) top = fmaxf(top, most[w * QUERIES + which]);
    float sum = a.sinks ? power(a.sinks[query + which] - top) : 0.f, value = 0.f;
    for (int w = 0; w < READERS; ++w) {
      const float by = power(most[w * QUERIES + which] - top);
      sum = __fmaf_rn(total[w * QUERIES + which], by, sum);
      value = __fmaf_rn(((const float*)(rings + w * bytes))[which * PITCH + c], by, value);
    }
    put_one(a.y, t, (query + which) * (int)a.dv + c, a.y_stride, a.y_as, __fdiv_rn(value, sum));
  }
}

template <int WIDTH>
__device__ __forceinline__ void attention_tensor(const AttentionArgs& a) {
  constexpr int RING = HALVES<WIDTH> * Reader<WIDTH>::HALF;
  SHARED_BYTES(shared);
  let_others_start();
  if (a.late) after_others();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = blockIdx.x;
  // inputs of the step are there before this kernel may start (see `pull`): asked for together, they come together
  const int rows = (int)from_host(a.rows), stride = (int)from_host(a.page_stride);
  const int mine = from_host(a.seq + t), own = from_host(a.positions + t);
  const Seen seen = seen_by(a, mine, own, rows, lane);
  if (t >= rows) { after_others(); return; }
  const int group = (int)a.heads / (int)a.kv_heads, batches = (group + QUERIES - 1) / QUERIES;
  const int head = (int)blockIdx.y / batches, first = (int)blockIdx.y % batches * QUERIES, query = head * group + first;
  const int many = group - first < QUERIES ? group - first : QUERIES;
  const int from = (seen.lo >> 4) + warp, to = (seen.hi + 15) >> 4;
  Reader<WIDTH> pages{a, seen, head, lane, from, from < to ? (to - from + READERS - 1) / READERS : 0,
                      a.pages + (i64)mine * stride + from, shared + warp * RING, 0, 0, 0};
  pages.begin();
  after_others();
  u32 q[WIDTH / 16][2];
  char* behind = shared + READERS * RING;
  take_queries<WIDTH>(a.q + t * a.q_stride + query * (int)a.d, many, (int)a.d, behind, q);
  Sums<WIDTH> sums;
  for (int e = 0; e < 2; ++e) { sums.most[e] = NEGATIVE; sums.total[e] = 0.f; }
  for (int c = 0; c < WIDTH / 16; ++c) for (int e = 0; e < 4; ++e) sums.out[c][e] = 0.f;
  add_pages<WIDTH>(pages, q, sums);
  float* most = (float*)(behind + QUERIES * 2 * WIDTH);
  merge_readers<WIDTH>(a, sums, shared, RING, most, most + READERS * QUERIES, t, query, many);
}

// Blocks of a processor are as many as its shared memory holds: 512 cells are then on the way at once.
extern "C" __global__ void __launch_bounds__(128, 6) attention_tensor_1(AttentionArgs a) { attention_tensor<64>(a); }
extern "C" __global__ void __launch_bounds__(128, 4) attention_tensor_2(AttentionArgs a) { attention_tensor<128>(a); }
extern "C" __global__ void __launch_bounds__(128, 3) attention_tensor_4(AttentionArgs a) { attention_tensor<256>(a); }
