// The kernels of products for few tokens: a format, and how many eights of columns. And those that make columns.

#define LINEAR(name, format, nt) \
  extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1 + FINISHERS<nt>), 1) name(const __grid_constant__ ChainArgs all) { \
    linear<format, nt>(all); \
  }

LINEAR(linear_q4_1, 4, 1)
LINEAR(linear_q4_2, 4, 2)
LINEAR(linear_q4_4, 4, 4)
LINEAR(linear_q4m_1, 5, 1)
LINEAR(linear_q4m_2, 5, 2)
LINEAR(linear_q4m_4, 5, 4)
LINEAR(linear_q8_1, 8, 1)
LINEAR(linear_q8_2, 8, 2)
LINEAR(linear_q8_4, 8, 4)
LINEAR(linear_bf16_1, 16, 1)
LINEAR(linear_bf16_2, 16, 2)
LINEAR(linear_bf16_4, 16, 4)

// Makes the columns of a token, for the kernel behind.
template <int FORMAT>
__device__ __forceinline__ void columns(const LinearArgs& a) {
  __shared__ float room[WARPS];
  const i64 piece = blockIdx.x / a.tokens, first = a.begin + piece * a.tokens, row = a.begin + blockIdx.x;
  const i64 rows = from_host(a.rows), left = rows - first;
  float w[8];
  if (a.norm_on) weights8(a, threadIdx.x, w);
  let_others_start();
  after_others();
  if (row >= rows) return;
  const int tokens = (int)(left < a.tokens ? left : a.tokens);
  const Layout<FORMAT> there(a, tokens, a.columns + piece * a.piece);
  const int t = (int)(row - first);
  if (FORMAT != 16 && a.digits == 1) stage<FORMAT, true>(a, row, t, tokens, w, there.x, room);
  else stage<FORMAT, false>(a, row, t, tokens, w, there.x, room);
}

extern "C" __global__ void __launch_bounds__(512) columns_q4(LinearArgs a) { columns<4>(a); }
extern "C" __global__ void __launch_bounds__(512) columns_q4m(LinearArgs a) { columns<5>(a); }
extern "C" __global__ void __launch_bounds__(512) columns_q8(LinearArgs a) { columns<8>(a); }
extern "C" __global__ void __launch_bounds__(512) columns_bf16(LinearArgs a) { columns<16>(a); }
