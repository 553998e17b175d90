// Rotation of neighbouring channels: 2i and 2i+1 of each head turn together.

struct PairsArgs {
  const float* x;
  i64 x_stride;
  const float* table;  // [rows][half cosines, half sines]
  i64 table_stride;
  float* y;
  i64 y_stride, heads, d, half;
  const i64* rows;
};

extern "C" __global__ void rope_pairs(PairsArgs a) {
  let_others_start();
  after_others();
  const i64 row = blockIdx.y, at = blockIdx.x * 256 + threadIdx.x, each = (a.d + 1) / 2;
  if (row >= *a.rows || at >= a.heads * each) return;
  const i64 i = at % each, channel = at / each * a.d + 2 * i;
  const float* x = a.x + row * a.x_stride + channel;
  float* y = a.y + row * a.y_stride + channel;
  const float even = x[0];
  if (i >= a.half) {
    const bool both = 2 * i + 1 < a.d;
    const float odd = both ? x[1] : 0.f;
    y[0] = even;
    if (both) y[1] = odd;
    return;
  }
  const float odd = x[1], cosine = a.table[row * a.table_stride + i], sine = a.table[row * a.table_stride + a.half + i];
  y[0] = __fsub_rn(__fmul_rn(even, cosine), __fmul_rn(odd, sine));
  y[1] = __fadd_rn(__fmul_rn(odd, cosine), __fmul_rn(even, sine));
}

