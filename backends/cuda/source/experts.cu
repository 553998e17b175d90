// Mixtures of experts: products with their weights, weighted sums.
//
// Pair p is choice p % top_k of token p / top_k. A product is cut into items, each an expert and some of the pairs that
// chose it, so that only chosen experts are read, and once for several tokens. `expert_items` finds them; for few pairs
// each is an item of its own. Pairs whose expert isn't there come last, as those of expert `experts`, and give NaN.
// Blocks share the tiles of all items evenly and compute as linear.cu does: the bits are those of a linear.

// One block. Which place a pair has among those of its expert isn't said.
extern "C" __global__ void __launch_bounds__(512) expert_items(Choices c) {
  SHARED_BYTES(words);
  let_others_start();
  after_others();
  const int pairs = (int)(*c.rows * c.top_k), kinds = (int)c.experts + 1, most = (int)c.most;
  int *counts = (int*)words, *next = counts + kinds;
  for (int e = threadIdx.x; e < kinds; e += 512) counts[e] = 0;
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += 512) atomicAdd(counts + expert_of(c, p), 1);
  __syncthreads();
  for (int e = threadIdx.x; e < kinds; e += 512) {
    int first = 0, item = 0;
    for (int h = 0; h < e; ++h) { first += counts[h]; item += (counts[h] + most - 1) / most; }
    next[e] = first;
    for (int left = counts[e]; left > 0; left -= most, first += most, ++item) {
      int* to = c.items + 1 + 3 * item;
      to[0] = e; to[1] = first; to[2] = left < most ? left : most;
    }
    if (e == kinds - 1) c.items[0] = item;
  }
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += 512) c.order[atomicAdd(next + expert_of(c, p), 1)] = p;
}

struct ExpertArgs {
  LinearArgs of;     // an expert's product; `w` and `bias` those of expert 0
  i64 expert_bytes;  // from one expert's weights to the next one's
  Choices choices;
};

// The tiles [lo, hi) that a block makes, counted through all items.
struct ExpertTiles {
  int lo, hi, tiles;

  __device__ __forceinline__ explicit ExpertTiles(const ExpertArgs& a) : tiles((int)a.of.tiles) {
    const i64 all = (i64)items_of(a.choices) * tiles;
    lo = (int)(all * blockIdx.x / gridDim.x);
    hi = (int)(all * (blockIdx.x + 1) / gridDim.x);
  }
  // One behind the last tile of the item that tile `at` belongs to.
  __device__ __forceinline__ int end(int at) const {
    const int last = (at / tiles + 1) * tiles;
    return last < hi ? last : hi;
  }
};

// What the copying warp does.
template <int FORMAT>
__device__ __forceinline__ void feed_experts(const ExpertArgs& a, const Ring& ring, int lane) {
  const int k = (int)a.of.k, nblk = (k + 31) / 32, span = (int)a.of.span, last = (int)a.of.n - 1;
  after_others();
  const ExpertTiles all(a);
  Turn turn;
  for (int at = all.lo; at < all.hi;) {
    const Item item = item_of(a.choices, at / all.tiles);
    const int end = all.end(at);
    const char* w = a.of.w + item.expert * a.expert_bytes;
    if (item.expert == a.choices.experts) at = end;
    for (; at < end; ++at)
      for (int b = 0; b < nblk; b += span) {
        barrier_wait(ring.empty + turn.slot, turn.parity ^ 1);
        const int count = nblk - b < span ? nblk - b : span;
        char* slot = ring.slots + turn.slot * ring.slot_bytes;
        fill_slot<FORMAT>(slot, ring.full + turn.slot, w, at % all.tiles * GROUPS<FORMAT>, 1, last, k, b, count, span, lane);
        turn.next(ring.depth);
      }
  }
}

// What the multiplying warps do: as `product`, with the columns of one item after the other.
template <int FORMAT, int NT, bool ONE>
__device__ __forceinline__ void multiply_experts(const ExpertArgs& a, const Ring& ring, char* room) {
  const int nblk = ((int)a.of.k + 31) / 32, span = (int)a.of.span, tokens = (int)a.of.tokens;
  Turn turn, given;
  after_others();
  const Layout<FORMAT> here(a.of, tokens, room);
  for (int at = ExpertTiles(a).lo;;) {
    const ExpertTiles all(a);  // anew for each item: registers are scarce
    if (at >= all.hi) break;
    const Item item = item_of(a.choices, at / all.tiles);
    int own = all.end(at) - at;  // tiles
    at += own;
    if (item.expert == a.choices.experts) continue;
    const float none[8] = {};
    for (int t = 0; t < item.count; ++t)
      stage<FORMAT, ONE>(a.of, row_of(a.choices, pair_of(a.choices, item, t)), t, tokens, none, here.x, here.parts);
    meet(0, 512);
    if (at == all.hi) let_others_start();
    for (; own; --own) multiply_tile<FORMAT, NT, ONE>(here, nblk, span, tokens, ring, turn, given);
    meet(0, 512);  // nobody reads these columns any more
  }
}

// What the last warp does: adds up, in order, what the others have for an output, and writes it.
template <int FORMAT>
__device__ __forceinline__ void finish_experts(const ExpertArgs& a, const Ring& ring, char* room, int lane) {
  constexpr int U = GROUPS<FORMAT>;
  const int r = lane & 15, side = lane >> 4;  // side: the group or, with one group, every other token
  u64* full = ring.full + 16;
  const Layout<FORMAT> here(a.of, (int)a.of.tokens, room);
  Turn given;
  after_others();
  const ExpertTiles all(a);
  for (int at = all.lo; at < all.hi;) {
    const Item item = item_of(a.choices, at / all.tiles);
    const bool none = item.expert == a.choices.experts;
    for (const int end = all.end(at); at < end; ++at) {
      const i64 channel = (i64)(at % all.tiles * U + (U == 2 ? side : 0)) * 16 + r;
      if (!none) barrier_wait(full + given.slot, given.parity);
      const float* set = here.parts + given.slot * here.set + (U == 2 ? side * here.cells * PITCH : 0);
      for (int t = U == 2 ? 0 : side; t < item.count; t += 3 - U) {
        float v = 0.f;
        if (none) v = __int_as_float(0x7fc00000);
        else
#pragma unroll
          for (int w = 0; w < WARPS; ++w) v = __fadd_rn(v, set[(t * 16 + r) * PITCH + w]);
        if (channel >= a.of.n) continue;
        if (a.of.bias && !none) v = __fadd_rn(v, a.of.bias[item.expert * a.of.n + channel]);
        a.of.y[pair_of(a.choices, item, t) * a.of.y_stride + channel] = v;
      }
      if (none) continue;
      __syncwarp();
      if (lane == 0) barrier_arrive(full + SUMS + given.slot);
      given.next(here.sets);
    }
  }
}

template <int FORMAT, int NT>
__device__ __forceinline__ void expert_linear(const ExpertArgs& a) {
  SHARED_BYTES(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Ring ring = ring_at(shared, (int)a.of.slot_bytes, (int)a.of.depth);
  char* room = shared + ring_bytes(ring.slot_bytes, ring.depth);
  if (warp == WARPS) feed_experts<FORMAT>(a, ring, lane);
  else if (warp > WARPS) finish_experts<FORMAT>(a, ring, room, lane);
  else if (FORMAT != 16 && a.of.digits == 1) multiply_experts<FORMAT, NT, true>(a, ring, room);
  else multiply_experts<FORMAT, NT, false>(a, ring, room);
}

extern "C" __global__ void __launch_bounds__(576, 1) expert_q4_1(ExpertArgs a) { expert_linear<4, 1>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_q4_2(ExpertArgs a) { expert_linear<4, 2>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_q4_4(ExpertArgs a) { expert_linear<4, 4>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_q4m_1(ExpertArgs a) { expert_linear<5, 1>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_q4m_2(ExpertArgs a) { expert_linear<5, 2>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_q4m_4(ExpertArgs a) { expert_linear<5, 4>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_q8_1(ExpertArgs a) { expert_linear<8, 1>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_q8_2(ExpertArgs a) { expert_linear<8, 2>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_q8_4(ExpertArgs a) { expert_linear<8, 4>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_bf16_1(ExpertArgs a) { expert_linear<16, 1>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_bf16_2(ExpertArgs a) { expert_linear<16, 2>(a); }
extern "C" __global__ void __launch_bounds__(576, 1) expert_bf16_4(ExpertArgs a) { expert_linear<16, 4>(a); }

// Any layout of plain elements and any K, in f32: a warp a channel of an item of up to 8 pairs.
struct PlainExpertArgs {
  const char* w;
  i64 n, k, format;  // 0 f32, 1 f16, 2 bf16
  const float* x;
  i64 x_stride;
  float* y;
  i64 y_stride;
  const float* bias;
  Choices choices;
};

extern "C" __global__ void __launch_bounds__(256) expert_plain(PlainExpertArgs a) {
  let_others_start();
  after_others();
  const i64 channel = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (channel >= a.n || (int)blockIdx.y >= items_of(a.choices)) return;
  const Item item = item_of(a.choices, blockIdx.y);
  const bool none = item.expert == a.choices.experts;
  const i64 at = item.expert * a.n + channel;
  const float* x[8];
  float sums[8];
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    x[t] = a.x + row_of(a.choices, pair_of(a.choices, item, t < item.count ? t : 0)) * a.x_stride;
    sums[t] = none ? __int_as_float(0x7fc00000) : 0.f;
  }
  for (i64 k = threadIdx.x & 31; k < a.k && !none; k += 32) {
    const float w = element(a.w, at * a.k + k, (int)a.format);
#pragma unroll
    for (int t = 0; t < 8; ++t)
      if (t < item.count) sums[t] = __fmaf_rn(x[t][k], w, sums[t]);
  }
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    if (t >= item.count) break;
    float v = warp_sum(sums[t]);
    if (a.bias && !none) v = __fadd_rn(v, a.bias[at]);
    if ((threadIdx.x & 31) == 0) a.y[pair_of(a.choices, item, t) * a.y_stride + channel] = v;
  }
}

// y[t] = Σ weight·x[t·top_k + j], j upwards, x that of `near` where the route has a number from 0, else of `far`; without
// a cache of experts both are the same.
struct ExpertSumArgs {
  const float* near;
  i64 near_stride;
  const float* far;
  i64 far_stride;
  const float* route;
  i64 route_stride;
  float* y;
  i64 y_stride, width, top_k;
  const i64* rows;
};

extern "C" __global__ void expert_sum(ExpertSumArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
  if (row >= *a.rows || i >= a.width) return;
  const float* route = a.route + row * a.route_stride;
  float sum = 0.f;
  for (i64 j = 0; j < a.top_k; ++j) {
    const i64 pair = row * a.top_k + j;
    const float x = route[j] >= 0.f ? a.near[pair * a.near_stride + i] : a.far[pair * a.far_stride + i];
    sum = __fadd_rn(sum, __fmul_rn(route[a.top_k + j], x));
  }
  a.y[row * a.y_stride + i] = sum;
}

// Which choices a cache of experts has: the route with slots for experts, -1 for those that have none; then the route
// with -1 for those that have one. Counts the choices.
struct ExpertCacheArgs {
  const float* route;
  i64 route_stride;
  const int* table;  // of each expert 1 + its slot, or 0
  int* asked;        // of each expert
  float* y;
  i64 y_stride, experts, top_k;
  const i64* rows;
};

extern "C" __global__ void expert_cache(ExpertCacheArgs a) {
  let_others_start();
  after_others();
  const int wide = 2 * (int)a.top_k, i = blockIdx.x * 256 + threadIdx.x;
  if (i >= (int)*a.rows * wide) return;
  const int row = i / wide, c = i % wide;
  const float v = a.route[row * a.route_stride + c];
  float near = v, far = v;
  if (c < (int)a.top_k) {
    const bool known = v >= 0.f && v < (float)a.experts;
    const int slot = known ? a.table[(int)v] : 0;
    near = (float)(slot - 1);
    if (slot) far = -1.f;
    if (known) atomicAdd(a.asked + (int)v, 1);
  }
  float* y = a.y + row * a.y_stride + c;
  y[0] = near;
  y[wide] = far;
}

// y = (clip(up, ±limit) + 1)·g·sigmoid(alpha·g), g = min(gate, limit)
struct ClampedArgs {
  const float* gate;
  i64 gate_stride;
  const float* up;
  i64 up_stride;
  float* y;
  i64 y_stride, width;
  double alpha, limit;
  const i64* rows;
};

extern "C" __global__ void gated_clamped(ClampedArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.y, i = blockIdx.x * 256 + threadIdx.x;
  if (row >= *a.rows || i >= a.width) return;
  const float gate = a.gate[row * a.gate_stride + i], up = a.up[row * a.up_stride + i], limit = (float)a.limit;
  const float g = gate > limit ? limit : gate, u = up > limit ? limit : up < -limit ? -limit : up;  // NaN stays NaN
  const float s = __fdiv_rn(1.f, 1.f + expf(-(float)a.alpha * g));
  a.y[row * a.y_stride + i] = __fmul_rn(__fmul_rn(__fadd_rn(u, 1.f), g), s);
}

