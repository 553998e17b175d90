// Products of many bf16 activations with experts: weights become bf16 in registers and meet 8·NT pairs of an item on
// tensor cores. A block makes 256 channels of one item, a warp 32 of them: two row groups. Inputs come in stages of
// SPAN blocks of 32, of which two are on their way while one is multiplied.

struct ExpertTileArgs {
  const char* w;
  i64 n, k, expert_bytes;
  const char* x;     // bf16, zeros up to a whole block of 32
  i64 x_stride;
  float* y;
  i64 y_stride;
  const float* bias;
  Choices choices;
};

constexpr int STAGES = 3;

// Where a stage has what. bf16: bytes from row to row, so that lanes meet different banks.
template <int FORMAT, int NT>
struct Stage {
  static constexpr int SPAN = FORMAT == 16 || NT == 8 ? 2 : 4;
  static constexpr int ROW = SPAN * 64 + 32;
  static constexpr int GROUP = FORMAT == 16 ? 16 * ROW : SPAN * BLOCK<FORMAT>;
  static constexpr int X = 16 * GROUP;  // behind the weights of 16 groups
  static constexpr int PITCH_OF_X = SPAN * 64 + (FORMAT == 8 ? 32 : 64);
  static constexpr int BYTES = X + 8 * NT * PITCH_OF_X;
};

#ifndef EMULATED
__device__ __forceinline__ u32 rounded_pair(float a, float b) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
  return d;
}
#else
inline u32 rounded_pair(float a, float b) { return pair(bf16_of(a), bf16_of(b)); }
#endif

// Four weights of a row, from four bytes; those of q8 have their upper bits turned.
template <int FORMAT>
__device__ __forceinline__ uint2 four_weights(u32 bytes, float scale, float least) {
  constexpr float ZERO = 8388608.f + (FORMAT == 4 ? 8.f : FORMAT == 8 ? 128.f : 0.f);  // 2²³ and more
  float v[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float whole = __uint_as_float(bytes_of(bytes, 0x4b000000u, 0x7440 + e)) - ZERO;
    v[e] = FORMAT == 5 ? __fmaf_rn(scale, whole, least) : __fmul_rn(scale, whole);
  }
  return make_uint2(rounded_pair(v[0], v[1]), rounded_pair(v[2], v[3]));
}

// A lane's weights of a block of 32 inputs in rows 2g and 2g+1 of a group, for two products of 16 inputs: of the lane
// number j among four inputs 8j…8j+7 or, with q8, 4j…4j+3 and 16+4j…16+4j+3.
template <int FORMAT, int NT>
__device__ __forceinline__ void two_rows(const char* group, int b, int g, int j, u32 (*w)[4]) {
  using S = Stage<FORMAT, NT>;
  if constexpr (FORMAT == 16) {
    const uint4 p = *(const uint4*)(group + 2 * g * S::ROW + b * 64 + j * 16);
    const uint4 q = *(const uint4*)(group + (2 * g + 1) * S::ROW + b * 64 + j * 16);
    w[0][0] = p.x; w[0][1] = q.x; w[0][2] = p.y; w[0][3] = q.y;
    w[1][0] = p.z; w[1][1] = q.z; w[1][2] = p.w; w[1][3] = q.w;
  } else {
    const char* quants = group + b * QUANTS<FORMAT> + j * 64 + g * 8;
    const char* scales = group + S::SPAN * QUANTS<FORMAT> + b * 32 + g * 4;
    const uint2 q = *(const uint2*)quants;
    uint2 behind = q;
    if constexpr (FORMAT == 8) behind = *(const uint2*)(quants + 256);
    const u32 both = *(const u32*)scales;
    u32 least = 0;
    if constexpr (FORMAT == 5) least = *(const u32*)(scales + S::SPAN * 32);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = half_to_float((u16)(both >> 16 * r));
      const float low = FORMAT == 5 ? half_to_float((u16)(least >> 16 * r)) : 0.f;
      const u32 first = r ? q.y : q.x, second = r ? behind.y : behind.x;
      const uint2 a = four_weights<FORMAT>(FORMAT == 8 ? first ^ 0x80808080u : first & 0x0f0f0f0fu, scale, low);
      const uint2 c = four_weights<FORMAT>(FORMAT == 8 ? second ^ 0x80808080u : second >> 4 & 0x0f0f0f0fu, scale, low);
      w[0][r] = a.x; w[0][2 + r] = a.y;
      w[1][r] = c.x; w[1][2 + r] = c.y;
    }
  }
}

// Begins to copy a stage: blocks [b, b + SPAN) of 32 inputs, zeros beyond the last one. rows: of x, -1 for pairs that
// aren't there. A warp copies its own two groups.
template <int FORMAT, int NT>
__device__ __forceinline__ void begin_stage(
    const ExpertTileArgs& a, int expert, char* stage, int b, const int* rows) {
  using S = Stage<FORMAT, NT>;
  const char* w = a.w + expert * a.expert_bytes;
  const int nblk = ((int)a.k + 31) / 32, lane = threadIdx.x & 31, first = (int)(threadIdx.x >> 5) * 2;
  for (int u = first; u < first + 2; ++u) {
    const int group = (int)blockIdx.x * 16 + u;
    char* to = stage + u * S::GROUP;
    if constexpr (FORMAT == 16) {
      constexpr int EACH = S::SPAN * 4;  // pieces of 16 bytes in a row
      for (int i = lane; i < 16 * EACH; i += 32) {
        const int row = group * 16 + i / EACH, at = i % EACH;
        const bool in = row < a.n && b + at / 4 < nblk;
        copy_ahead(to + i / EACH * S::ROW + at * 16, w + (in ? ((i64)row * a.k + b * 32) * 2 + at * 16 : 0), in);
      }
    } else {
      constexpr int EACH = QUANTS<FORMAT> / 16, PARTS = FORMAT == 5 ? 2 : 1;
      const char* from = w + group_bytes(nblk, FORMAT) * group;
      const bool here = group * 16 < a.n;
      for (int i = lane; i < S::SPAN * EACH; i += 32) {
        const bool in = here && b + i / EACH < nblk;
        copy_ahead(to + i * 16, in ? from + (i64)b * QUANTS<FORMAT> + i * 16 : w, in);
      }
      if (lane < S::SPAN * 2 * PARTS) {  // scales, then minima
        const int part = lane / (S::SPAN * 2), at = lane % (S::SPAN * 2);
        const bool in = here && b + at / 2 < nblk;
        const i64 before = (i64)nblk * (QUANTS<FORMAT> + part * 32) + b * 32 + at * 16;
        copy_ahead(to + S::SPAN * (QUANTS<FORMAT> + part * 32) + at * 16, in ? from + before : w, in);
      }
    }
  }
  constexpr int EACH = S::SPAN * 4;
  for (int i = threadIdx.x; i < 8 * NT * EACH; i += 256) {
    const int row = rows[i / EACH], at = i % EACH;
    const bool in = row >= 0 && b + at / 4 < nblk;
    copy_ahead(stage + S::X + i / EACH * S::PITCH_OF_X + at * 16,
               a.x + (in ? ((i64)row * a.x_stride + b * 32) * 2 + at * 16 : 0), in);
  }
}

template <int FORMAT, int NT>
__device__ __forceinline__ void expert_tiles(const ExpertTileArgs& a) {
  using S = Stage<FORMAT, NT>;
  SHARED_BYTES(shared);
  __shared__ int pairs[8 * NT], rows[8 * NT], expert, count;
  let_others_start();
  after_others();
  if ((int)blockIdx.y >= items_of(a.choices)) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
  if (threadIdx.x < 8 * NT) {
    const Item item = item_of(a.choices, blockIdx.y);
    if (threadIdx.x == 0) { expert = item.expert; count = item.count; }
    const bool in = (int)threadIdx.x < item.count;
    const int pair = in ? pair_of(a.choices, item, threadIdx.x) : 0;
    pairs[threadIdx.x] = pair;
    rows[threadIdx.x] = in ? (int)row_of(a.choices, pair) : -1;
  }
  __syncthreads();
  const bool none = expert == a.choices.experts;
  float sums[2][NT][4];
#pragma unroll
  for (int i = 0; i < 8 * NT; ++i) (&sums[0][0][0])[i] = none ? __int_as_float(0x7fc00000) : 0.f;
  const int stages = none ? 0 : (((int)a.k + 31) / 32 + S::SPAN - 1) / S::SPAN;
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < stages) begin_stage<FORMAT, NT>(a, expert, shared + s * S::BYTES, s * S::SPAN, rows);
    copies_end();
  }
  for (int s = 0; s < stages; ++s) {
    copies_but<STAGES - 2>();
    __syncthreads();  // all copies of this stage are there, and nobody reads the one that is filled next
    const int next = s + STAGES - 1;
    if (next < stages) begin_stage<FORMAT, NT>(a, expert, shared + next % STAGES * S::BYTES, next * S::SPAN, rows);
    copies_end();
    const char* stage = shared + s % STAGES * S::BYTES;
#pragma unroll(NT == 8 ? 1 : S::SPAN)
    for (int b = 0; b < S::SPAN; ++b) {
      u32 held[2][2][4];
#pragma unroll
      for (int u = 0; u < 2; ++u) two_rows<FORMAT, NT>(stage + (2 * warp + u) * S::GROUP, b, g, j, held[u]);
#pragma unroll
      for (int t = 0; t < NT; ++t) {
        const char* x = stage + S::X + (t * 8 + g) * S::PITCH_OF_X + b * 64;
        uint2 first, second;
        if constexpr (FORMAT == 8) {
          first = *(const uint2*)(x + j * 8);
          second = *(const uint2*)(x + j * 8 + 32);
        } else {
          const uint4 v = *(const uint4*)(x + j * 16);
          first = make_uint2(v.x, v.y);
          second = make_uint2(v.z, v.w);
        }
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          mma(sums[u][t], held[u][0][0], held[u][0][1], held[u][0][2], held[u][0][3], first.x, first.y);
          mma(sums[u][t], held[u][1][0], held[u][1][1], held[u][1][2], held[u][1][3], second.x, second.y);
        }
      }
    }
  }
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i64 channel = ((i64)blockIdx.x * 16 + 2 * warp + u) * 16 + 2 * g + r;
      if (channel >= a.n) continue;
      const float bias = a.bias && expert < a.choices.experts ? a.bias[expert * a.n + channel] : 0.f;
#pragma unroll
      for (int t = 0; t < NT; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = t * 8 + 2 * j + e;
          if (at < count) a.y[pairs[at] * a.y_stride + channel] = sums[u][t][2 * r + e] + bias;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) expert_tiles_q4_4(ExpertTileArgs a) { expert_tiles<4, 4>(a); }
extern "C" __global__ void __launch_bounds__(256, 2) expert_tiles_q4_8(ExpertTileArgs a) { expert_tiles<4, 8>(a); }
extern "C" __global__ void __launch_bounds__(256, 2) expert_tiles_q4m_4(ExpertTileArgs a) { expert_tiles<5, 4>(a); }
extern "C" __global__ void __launch_bounds__(256, 2) expert_tiles_q4m_8(ExpertTileArgs a) { expert_tiles<5, 8>(a); }
extern "C" __global__ void __launch_bounds__(256, 2) expert_tiles_q8_4(ExpertTileArgs a) { expert_tiles<8, 4>(a); }
extern "C" __global__ void __launch_bounds__(256, 2) expert_tiles_q8_8(ExpertTileArgs a) { expert_tiles<8, 8>(a); }
extern "C" __global__ void __launch_bounds__(256, 1) expert_tiles_bf16_4(ExpertTileArgs a) { expert_tiles<16, 4>(a); }
extern "C" __global__ void __launch_bounds__(256, 1) expert_tiles_bf16_8(ExpertTileArgs a) { expert_tiles<16, 8>(a); }

