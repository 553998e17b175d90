// What kernels of paged attention take. A state is kv[P][2][Hk][16][D], f32 or bf16.

struct AttentionArgs {
  const float* q;
  i64 q_stride, heads, kv_heads, d, dv;
  char* kv;
  i64 dim, bf16;
  const int *positions, *seq, *pages;
  const i64* page_stride;
  float* y;
  i64 y_stride, y_as;           // as `put_some` takes them
  const float* sinks;
  double scale, softcap;
  i64 window, causal, rounded;  // rounded: queries and weights are bf16
  i64 late;                     // as in RopeArgs
  const i64* rows;
  float* parts;                 // [T][kv_heads·batches][ranges][G][dim + 2]: sums, largest, total
  int* through;                 // [T][kv_heads·batches], 0 before and after
  const float *k, *v, *table;   // of the only token, not yet in the cache: q and k are to be rotated; or 0
  i64 half;
};

constexpr float NEGATIVE = -3.0e38f;  // below every score; a difference of two such is no NaN
