// Latent attention: a state kv[P][1][1][16][d] holds keys, whose last channels are their values; products by heads.

struct LatentWriteArgs {
  const float* k;     // [rows][d − dv]
  i64 k_stride;
  const float* v;     // [rows][dv]
  i64 v_stride, own, d;
  char* kv;
  i64 bf16;
  const int *positions, *seq, *pages;
  const i64 *page_stride, *rows;
};

__device__ __forceinline__ i64 row_in_cache(const int* pages, i64 page_stride, int seq, int position) {
  return (i64)pages[seq * page_stride + position / 16] * 16 + position % 16;
}

extern "C" __global__ void latent_write(LatentWriteArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.x;
  if (row >= *a.rows) return;
  const i64 at = row_in_cache(a.pages, *a.page_stride, a.seq[row], a.positions[row]) * a.d;
  for (i64 c = threadIdx.x; c < a.d; c += blockDim.x)
    put_as((float*)a.kv, at + c, c < a.own ? a.k[row * a.k_stride + c] : a.v[row * a.v_stride + c - a.own], a.bf16);
}

struct LatentArgs {
  const float* q;
  i64 q_stride, heads, d, dv;
  const char* kv;
  i64 bf16;
  const int *positions, *seq, *pages;
  const i64* page_stride;
  float* y;
  i64 y_stride, y_bf16;
  const float* sinks;
  double scale, softcap;
  i64 window, causal, rounded;  // rounded: queries and weights to bf16
  const i64* rows;
  float* parts;                 // [rows][heads][ranges][dv + 2]: sums, their maximum, their weight. 0: a block does all
  i64 ranges;
};

constexpr int PAGES_OF_RANGE = 16;  // whose keys are summed up before they join the others: whoever sums them
constexpr int MOST_D = 20, MOST_DV = 16;  // channels of a lane

struct Keys {
  int first, end;
};

// The keys [first, end) that a token sees.
__device__ __forceinline__ Keys keys_of(const LatentArgs& a, i64 row) {
  int end = a.positions[row] + 1;
  const int first = a.window > 0 && end > a.window ? end - (int)a.window : 0;
  if (!a.causal)
    for (i64 t = 0; t < *a.rows; ++t)
      if (a.seq[t] == a.seq[row] && a.positions[t] >= end) end = a.positions[t] + 1;
  return Keys{first, end};
}

// Sums of values with weights e^(score − top), and the weights' sum; `join` adds others, in one order for all callers.
__device__ __forceinline__ void join(
    float& top, float& total, float* sums, int count, float top2, float total2, const float* sums2, i64 stride) {
  const float most = fmaxf(top, top2), f = expf(top - most), g = expf(top2 - most);
  total = __fmaf_rn(total, f, __fmul_rn(total2, g));
  for (int i = 0; i < count; ++i) sums[i] = __fmaf_rn(sums[i], f, __fmul_rn(sums2[i * stride], g));
  top = most;
}

__device__ __forceinline__ float over_all(const LatentArgs& a, float top, float total, i64 head) {
  return a.sinks ? __fadd_rn(total, expf(a.sinks[head] - top)) : total;
}

// Eight heads of a token, a warp each: all of its keys or, with `parts`, one range of them.
extern "C" __global__ void __launch_bounds__(256) latent_attention(LatentArgs a) {
  SHARED_BYTES(bytes);
  float* page = (float*)bytes;  // [16][d]
  let_others_start();
  after_others();
  const i64 row = blockIdx.x;
  if (row >= *a.rows) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, d = (int)a.d, dv = (int)a.dv;
  const i64 head = blockIdx.y * 8 + warp;
  const bool in = head < a.heads;
  const Keys keys = keys_of(a, row);
  const int* table = a.pages + a.seq[row] * *a.page_stride;
  const int width = 16 * PAGES_OF_RANGE;
  int range = a.parts ? (int)blockIdx.z : keys.first / width;
  const int last = a.parts ? range : (keys.end - 1) / width;
  if (range * width >= keys.end || (range + 1) * width <= keys.first) return;
  float q[MOST_D], all[MOST_DV], top = -INFINITE, total = 0.f;
#pragma unroll
  for (int i = 0; i < MOST_D; ++i) {
    const int c = lane + 32 * i;
    q[i] = in && c < d ? a.q[row * a.q_stride + head * d + c] : 0.f;
    if (a.rounded) q[i] = float_of(bf16_of(q[i]));
  }
#pragma unroll
  for (int i = 0; i < MOST_DV; ++i) all[i] = 0.f;
  for (; range <= last; ++range) {
    float sums[MOST_DV], here = -INFINITE, weight = 0.f;
#pragma unroll
    for (int i = 0; i < MOST_DV; ++i) sums[i] = 0.f;
    for (int p = range * PAGES_OF_RANGE; p < (range + 1) * PAGES_OF_RANGE; ++p) {
      const int lo = keys.first > p * 16 ? keys.first - p * 16 : 0;
      const int hi = keys.end - p * 16 < 16 ? keys.end - p * 16 : 16;
      if (lo >= hi) continue;
      __syncthreads();  // nobody reads the page before
      const i64 from = (i64)table[p] * 16 * d;
      for (int i = lo * d + threadIdx.x; i < hi * d; i += 256)
        page[i] = a.bf16 ? float_of(((const u16*)a.kv)[from + i]) : ((const float*)a.kv)[from + i];
      __syncthreads();
      float score = -INFINITE;  // of the key that the lane's number is
      for (int key = lo; key < hi; ++key) {
        float dot = 0.f;
#pragma unroll
        for (int i = 0; i < MOST_D; ++i)
          if (lane + 32 * i < d) dot = __fmaf_rn(q[i], page[key * d + lane + 32 * i], dot);
        dot = __fmul_rn(warp_sum(dot), (float)a.scale);
        if (a.softcap > 0) dot = (float)a.softcap * tanhf(dot / (float)a.softcap);
        if (lane == key) score = dot;
      }
      const float most = fmaxf(here, warp_max(score)), f = expf(here - most);
      float w = expf(score - most);
      weight = __fmaf_rn(weight, f, warp_sum(w));
      if (a.rounded) w = float_of(bf16_of(w));
      here = most;
#pragma unroll
      for (int i = 0; i < MOST_DV; ++i) sums[i] = __fmul_rn(sums[i], f);
      for (int key = lo; key < hi; ++key) {
        const float by = __shfl_sync(0xffffffffu, w, key);
#pragma unroll
        for (int i = 0; i < MOST_DV; ++i)
          if (lane + 32 * i < dv) sums[i] = __fmaf_rn(by, page[key * d + d - dv + lane + 32 * i], sums[i]);
      }
    }
    if (a.parts) {
      if (!in) return;
      float* to = a.parts + ((row * a.heads + head) * a.ranges + range) * (dv + 2);
#pragma unroll
      for (int i = 0; i < MOST_DV; ++i)
        if (lane + 32 * i < dv) to[lane + 32 * i] = sums[i];
      if (lane == 0) { to[dv] = here; to[dv + 1] = weight; }
      return;
    }
    join(top, total, all, MOST_DV, here, weight, sums, 1);
  }
  if (!in) return;
  const float sink = a.sinks ? a.sinks[head] : -INFINITE;
  const float most = fmaxf(top, sink), f = expf(top - most);
  total = over_all(a, most, __fmul_rn(total, f), head);
#pragma unroll
  for (int i = 0; i < MOST_DV; ++i)
    if (lane + 32 * i < dv)
      put_as(a.y, row * a.y_stride + head * dv + lane + 32 * i, __fdiv_rn(__fmul_rn(all[i], f), total), a.y_bf16);
}

// Joins the ranges of a token and head, in order.
extern "C" __global__ void latent_merge(LatentArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.x, head = blockIdx.y;
  if (row >= *a.rows) return;
  const Keys keys = keys_of(a, row);
  const int width = 16 * PAGES_OF_RANGE, dv = (int)a.dv;
  for (int c = threadIdx.x; c < dv; c += blockDim.x) {
    float top = -INFINITE, total = 0.f, sum = 0.f;
    for (int range = keys.first / width; range <= (keys.end - 1) / width; ++range) {
      const float* part = a.parts + ((row * a.heads + head) * a.ranges + range) * (dv + 2);
      join(top, total, &sum, 1, part[dv], part[dv + 1], part + c, 1);
    }
    const float sink = a.sinks ? a.sinks[head] : -INFINITE;
    const float most = fmaxf(top, sink), f = expf(top - most);
    total = over_all(a, most, __fmul_rn(total, f), head);
    put_as(a.y, row * a.y_stride + head * dv + c, __fdiv_rn(__fmul_rn(sum, f), total), a.y_bf16);
  }
}

// Of each head of x the channels behind the first k, then its first k times the head's n rows of w, transposed.
struct HeadLinearArgs {
  const char* w;
  i64 format, heads, d, n, k;
  const float* x;
  i64 x_stride;
  float* y;
  i64 y_stride;
  const i64* rows;
};

// A warp a channel of 8 tokens.
extern "C" __global__ void __launch_bounds__(256) head_linear(HeadLinearArgs a) {
  let_others_start();
  after_others();
  const i64 kept = a.d - a.k, each = kept + a.n, channel = blockIdx.x * 8 + (threadIdx.x >> 5), first = blockIdx.y * 8;
  const int left = (int)(*a.rows - first < 8 ? *a.rows - first : 8), lane = threadIdx.x & 31;
  if (channel >= a.heads * each || left <= 0) return;
  const i64 head = channel / each, c = channel % each;
  const float* x = a.x + first * a.x_stride + head * a.d;
  float* y = a.y + first * a.y_stride + channel;
  if (c < kept) {
    if (lane < left) y[lane * a.y_stride] = x[lane * a.x_stride + a.k + c];
    return;
  }
  float sums[8] = {};
  const i64 at = (head * a.n + c - kept) * a.k;
  for (i64 i = lane; i < a.k; i += 32) {
    const float w = element(a.w, at + i, (int)a.format);
#pragma unroll
    for (int t = 0; t < 8; ++t)
      if (t < left) sums[t] = __fmaf_rn(x[t * a.x_stride + i], w, sums[t]);
  }
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    if (t >= left) break;
    const float v = warp_sum(sums[t]);
    if (lane == 0) y[t * a.y_stride] = v;
  }
}

