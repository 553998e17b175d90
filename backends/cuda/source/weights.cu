// Rows of weights without tensor cores: plain products, unpacking, embeddings.

// Any layout of plain elements and any K, in f32: one warp a channel, one token a block row.
struct PlainArgs {
  const char* w;
  const i64* w_at;
  i64 n, k, format;  // 0 f32, 1 f16, 2 bf16
  const float* x;
  i64 x_stride;
  float* y;
  i64 y_stride;
  const float* bias;
  const float* residual;
  i64 residual_stride;
  const i64* rows;
};

extern "C" __global__ void linear_plain(PlainArgs a) {
  let_others_start();
  after_others();
  const i64 token = blockIdx.y, channel = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (token >= *a.rows || channel >= a.n) return;
  const char* w = a.w_at ? (const char*)*a.w_at + (i64)a.w : a.w;
  const float* x = a.x + token * a.x_stride;
  float sum = 0.f;
  for (i64 k = threadIdx.x & 31; k < a.k; k += 32)
    sum = __fmaf_rn(x[k], element(w, channel * a.k + k, (int)a.format), sum);
  sum = warp_sum(sum);
  if (threadIdx.x & 31) return;
  if (a.bias) sum += a.bias[channel];
  if (a.residual) sum += a.residual[token * a.residual_stride + channel];
  a.y[token * a.y_stride + channel] = sum;
}

// Rows of a packed matrix as bf16 [n, k], for a library's matrix product.
struct UnpackArgs {
  const char* w;
  const i64* w_at;
  i64 n, k, format;  // 4 q4, 5 q4m, 8 q8
  u16* y;
};

__device__ __forceinline__ float unpacked(const char* group, int nblk, int r, i64 k, int format) {
  const i64 b = k >> 5, i = k & 31;
  const u8* q = (const u8*)group;
  const i64 quants = (i64)nblk * (format == 8 ? 512 : 256);
  const u16* halves = (const u16*)(group + quants);
  const float scale = half_to_float(halves[b * 16 + r]);
  if (format == 8) return scale * (float)(signed char)q[b * 512 + (i >> 2) * 64 + r * 4 + (i & 3)];
  const u8 both = q[b * 256 + (i >> 3) * 64 + r * 4 + (i & 3)];
  const float n = (float)((i & 4) ? both >> 4 : both & 15);
  if (format == 4) return scale * (n - 8.f);
  return __fadd_rn(__fmul_rn(scale, n), half_to_float(halves[(i64)nblk * 16 + b * 16 + r]));
}

// A warp takes a block of 32 inputs of 16 rows, two lanes a row.
extern "C" __global__ void __launch_bounds__(256) unpack(UnpackArgs a) {
  let_others_start();
  after_others();
  const char* w = a.w_at ? (const char*)*a.w_at + (i64)a.w : a.w;
  const int nblk = ((int)a.k + 31) / 32, lane = threadIdx.x & 31, format = (int)a.format;
  const i64 size = group_bytes(nblk, format), all = (a.n + 15) / 16 * nblk;
  const int r = lane >> 1, half = lane & 1;
  for (i64 i = blockIdx.x * 8 + (threadIdx.x >> 5); i < all; i += (i64)gridDim.x * 8) {
    const i64 group = i / nblk, row = group * 16 + r;
    const int b = (int)(i % nblk), k = b * 32 + half * 16;
    const char* from = w + group * size;
    const char* quants = from + (i64)b * (format == 8 ? 512 : 256);
    const u16* scales = (const u16*)(from + (i64)nblk * (format == 8 ? 512 : 256)) + b * 16 + r;
    const float scale = half_to_float(scales[0]), least = format == 5 ? half_to_float(scales[(i64)nblk * 16]) : 0.f;
    u32 out[8];
#pragma unroll
    for (int c = 0; c < 4; ++c) {  // four values each
      float v[4];
      if (format == 8) {
        const u32 q = *(const u32*)(quants + (4 * half + c) * 64 + r * 4);
        for (int e = 0; e < 4; ++e) v[e] = scale * (float)(signed char)(q >> 8 * e);
      } else {
        const u32 q = *(const u32*)(quants + (2 * half + (c >> 1)) * 64 + r * 4) >> 4 * (c & 1);
        for (int e = 0; e < 4; ++e) {
          const float n = (float)(q >> 8 * e & 15);
          v[e] = format == 4 ? scale * (n - 8.f) : __fadd_rn(__fmul_rn(scale, n), least);
        }
      }
      out[2 * c] = pair(bf16_of(v[0]), bf16_of(v[1]));
      out[2 * c + 1] = pair(bf16_of(v[2]), bf16_of(v[3]));
    }
    if (row >= a.n) continue;
    u16* y = a.y + row * a.k + k;
    if (k + 16 <= a.k && a.k % 8 == 0) {
      *(uint4*)y = make_uint4(out[0], out[1], out[2], out[3]);
      *(uint4*)(y + 8) = make_uint4(out[4], out[5], out[6], out[7]);
    } else {
      for (int e = 0; e < 16; ++e) if (k + e < a.k) y[e] = (u16)(out[e >> 1] >> 16 * (e & 1));
    }
  }
}

struct EmbeddingArgs {
  const void* ids;
  i64 wide;            // ids are i64
  const char* w;
  const i64* w_at;
  i64 n, k, format;    // 0 f32, 1 f16, 2 bf16; 4, 5, 8
  float* y;
  i64 y_stride;
  const i64* rows;
};

extern "C" __global__ void embedding(EmbeddingArgs a) {
  let_others_start();
  after_others();
  const i64 token = blockIdx.y, k = blockIdx.x * 256 + threadIdx.x;
  if (token >= *a.rows || k >= a.k) return;
  const char* w = a.w_at ? (const char*)*a.w_at + (i64)a.w : a.w;
  const i64 id = a.wide ? ((const i64*)a.ids)[token] : ((const int*)a.ids)[token];
  float v = __int_as_float(0x7fc00000);
  if (id >= 0 && id < a.n) {
    const int nblk = ((int)a.k + 31) / 32;
    const i64 size = (i64)nblk * (a.format == 8 ? 544 : a.format == 5 ? 320 : 288);
    v = a.format < 4 ? element(w, id * a.k + k, (int)a.format)
                     : unpacked(w + id / 16 * size, nblk, (int)(id % 16), k, (int)a.format);
  }
  a.y[token * a.y_stride + k] = v;
}

// The same for rows that lie in one piece each. A thread takes 32 numbers: what a warp reads lies side by side, as it
// has to where a table is read over a link.
extern "C" __global__ void embedding_rows(EmbeddingArgs a) {
  let_others_start();
  after_others();
  const i64 token = blockIdx.y, b = blockIdx.x * 128 + threadIdx.x, nblk = (a.k + 31) / 32;
  if (token >= *a.rows || b >= nblk) return;
  const i64 id = a.wide ? ((const i64*)a.ids)[token] : ((const int*)a.ids)[token];
  const int words = a.format == 8 ? 8 : 4;
  const i64 size = nblk * (4 * words + (a.format == 5 ? 4 : 2));
  u32 q[8] = {};
  float scale = __int_as_float(0x7fc00000), least = 0.f;
  if (id >= 0 && id < a.n) {
    const char* row = a.w + id * size;
    const u16 *some = (const u16*)row + b * 2 * words, *scales = (const u16*)row + nblk * 2 * words;
    if (((u64)a.w | (u64)size) % 16 == 0) {
      for (int i = 0; i < words; i += 4) {
        const uint4 four = ((const uint4*)some)[i >> 2];
        q[i] = four.x, q[i + 1] = four.y, q[i + 2] = four.z, q[i + 3] = four.w;
      }
    } else {
      for (int i = 0; i < words; ++i) q[i] = pair(some[2 * i], some[2 * i + 1]);
    }
    scale = half_to_float(scales[b]);
    if (a.format == 5) least = half_to_float(scales[nblk + b]);
  }
  float* y = a.y + token * a.y_stride + b * 32;
  const bool whole = b * 32 + 32 <= a.k && ((u64)a.y | (u64)(4 * a.y_stride)) % 16 == 0;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    float v[4];
    const u32 four = a.format == 8 ? q[c] : q[c >> 1] >> 4 * (c & 1);
    for (int e = 0; e < 4; ++e) {
      const float n = (float)(four >> 8 * e & 15);
      v[e] = a.format == 8   ? scale * (float)(signed char)(four >> 8 * e)
             : a.format == 4 ? scale * (n - 8.f)
                             : __fadd_rn(__fmul_rn(scale, n), least);
    }
    if (whole) {
      *(float4*)(y + 4 * c) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      for (int e = 0; e < 4; ++e) if (b * 32 + 4 * c + e < a.k) y[4 * c + e] = v[e];
    }
  }
}
