// The kernels of products for few tokens: a format, and how many eights of columns.

#define LINEAR(name, format, nt) \
  extern "C" __global__ void __launch_bounds__(576, 1) name(LinearArgs a) { linear<format, nt>(a); }

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
