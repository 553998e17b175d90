// What a step exchanges with others while it runs: ticks, and rows of f32 in memory of the host's.

struct CarryArgs {
  i64 ticks[4], steps[4];  // words of the host's to wait for, 0 for none; steps: 0, or -1 for the step before
  const i64 *epoch, *abort;
  const char* x;           // rows to copy, 0 for none
  i64 x_stride;            // bytes
  char* y;
  i64 y_stride, words;     // of 4 bytes, of a row
  const i64* rows;
  i64* signal;             // a word of the host's that gets the epoch at the end, 0 for none
  int* through;            // 0 before and after
  i64* stamps;             // nanoseconds of the device's clock: came, went on, ended
  i64 holds;               // whether weights are among what it waits for
};

// Kernels behind it may load their weights meanwhile, unless they arrive only then.
extern "C" __global__ void __launch_bounds__(256) carry(CarryArgs a) {
  if (!a.holds) let_others_start();
  after_others();
  const i64 epoch = *a.epoch;
  if (threadIdx.x == 0 && a.ticks[0]) {
    const i64 came = clock_ns();
    for (int t = 0; t < 4; ++t)
      while (a.ticks[t] && from_host((const i64*)a.ticks[t]) < epoch + a.steps[t] && !from_host(a.abort)) {}
    see_the_host();
    if (blockIdx.x == 0) { a.stamps[0] = came; a.stamps[1] = clock_ns(); }
  }
  __syncthreads();
  if (a.holds) let_others_start();
  const int rows = a.x ? (int)*a.rows : 0, words = (int)a.words;
  const bool fours = !(((i64)a.x | a.x_stride | (i64)a.y | a.y_stride | words * 4) & 15);
  const int pieces = fours ? words / 4 : words, size = fours ? 16 : 4;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < rows * pieces; i += gridDim.x * 256) {
    const int row = i / pieces, at = i % pieces * size;
    const char* from = a.x + row * a.x_stride + at;
    char* to = a.y + row * a.y_stride + at;
    if (fours) *(uint4*)to = words_of((const uint4*)from);
    else *(u32*)to = from_host((const u32*)from);
  }
  if (!a.signal) return;
  show_the_host();
  __syncthreads();
  if (threadIdx.x) return;
  if (atomicAdd(a.through, 1) != (int)gridDim.x - 1) return;
  *a.through = 0;
  a.stamps[2] = clock_ns();
  show_the_host();
  *(volatile i64*)a.signal = epoch;
}
