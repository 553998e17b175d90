// y = x·wᵀ (+ bias) (+ residual) of bf16 activations for some more tokens: weights are unpacked in registers, to the bf16
// that `unpack` makes of them, and meet tiles of tokens on tensor cores.
//
// A tile is 32 channels for each of `warps` warps and 8·NT tokens. With fewer than eight such warps, two share channels
// and take turns with the inputs: the second one hands its sums to the first. A ninth warp copies weights and
// activations into a ring in shared memory; weights are on their way while the kernel before ends.
//
// All tiles' inputs, in slots of the ring, are dealt out to the blocks as evenly as can be, one tile behind the other. A
// tile that several blocks have a part in is added up, in their order, by the last that is through.
//
// With `act`, a warp's channels are 16 of the gate and the same 16 of up: y = act(gate)·up.

struct GemmArgs {
  const char* w;             // rows of the first group
  i64 n, k;                  // channels (of y), inputs
  i64 second;                // groups from gate to up; 0: none
  const char* x;             // bf16; whole blocks of 32 inputs
  i64 x_stride;
  float* y;
  i64 y_stride, y_bf16;
  const float* bias;
  const float* residual;
  i64 residual_stride, act;
  const i64* rows;           // tokens in this step
  i64 warps;                 // with channels of their own: 8 or 4
  i64 span;                  // blocks of 32 inputs in one slot of the ring, an even number
  i64 slot_bytes, depth;     // of the ring
  int* counts;               // [blocks][8], zeros: parts that are through of the tile that begins in a block and ends in another
  float4* sums;              // [blocks][2][warps][2·NT][32]: of a tile that began in a block before, or in this one
};

constexpr int MULTIPLY = 8;  // warps; behind them one that copies

template <int FORMAT>
__device__ __forceinline__ int x_pitch(int span) { return span * 64 + (FORMAT == 8 ? 32 : 64); }

// A block's share of the work. A unit: a slot's inputs of one tile.
struct Share {
  int chunks, each;      // units of a tile, of a block
  int tokens, columns;   // in this step; tiles of them
  int begin, end;        // units of this block
  __device__ __forceinline__ int owner(int unit) const { return unit / each; }
};

__device__ __forceinline__ Share share_of(const GemmArgs& a, int width) {
  Share s;
  const int nblk = ((int)a.k + 31) / 32, span = (int)a.span, wide = (int)a.warps * (a.second ? 16 : 32);
  s.chunks = (nblk + span - 1) / span;
  s.tokens = (int)from_host(a.rows);
  s.columns = (s.tokens + width - 1) / width;
  const int all = ((int)a.n + wide - 1) / wide * s.columns * s.chunks;
  s.each = (all + (int)gridDim.x - 1) / (int)gridDim.x;
  s.begin = (int)blockIdx.x * s.each;
  s.end = s.begin + s.each < all ? s.begin + s.each : all;
  return s;
}

// What the copying warp does.
template <int FORMAT, int NT>
struct Filler {
  const GemmArgs& a;
  const Share& share;
  const Ring& ring;
  int lane, nblk, span;

  __device__ __forceinline__ int count(int chunk) const {
    return nblk - chunk * span < span ? nblk - chunk * span : span;
  }
  __device__ __forceinline__ void copy(void* to, const void* from, int bytes, u64* full) const {
#ifdef BULK
    bulk_ahead(to, from, bytes, full);
#else
    for (int c = 0; c < bytes; c += 16) copy_ahead((char*)to + c, (const char*)from + c, true);
#endif
  }

  // Announces a unit, and copies its weights: for each group of 16 channels quants, scales and, with q4m, minima.
  __device__ __forceinline__ void weights(int unit, int slot) const {
    constexpr int PARTS = FORMAT == 5 ? 3 : 2;
    const int tile = unit / share.chunks, chunk = unit - tile * share.chunks, blocks = count(chunk);
    const int row = tile / share.columns, warps = (int)a.warps, b = chunk * span;
    const int last = (int)((a.second ? a.second + a.second : (a.n + 15) / 16) - 1);
    char* to = ring.slots + slot * ring.slot_bytes;
    u64* full = ring.full + slot;
#ifdef BULK
    if (lane == 0) barrier_expect(full, 2 * warps * blocks * BLOCK<FORMAT> + held(tile) * blocks * 64);
    __syncwarp();
#endif
    for (int i = lane; i < 2 * warps * PARTS; i += 32) {
      const int part = i / (2 * warps), u = i - part * 2 * warps;  // group u: the half u & 1 of warp u / 2
      const int group = a.second ? row * warps + (u >> 1) + (u & 1) * (int)a.second : row * 2 * warps + u;
      const int before = part ? QUANTS<FORMAT> + (part - 1) * 32 : 0, each = part ? 32 : QUANTS<FORMAT>;
      copy(to + span * (u * BLOCK<FORMAT> + before),
           a.w + group_bytes(nblk, FORMAT) * (group < last ? group : last) + (i64)nblk * before + b * each,
           blocks * each, full);
    }
  }

  // Tokens of a tile.
  __device__ __forceinline__ int held(int tile) const {
    const int left = share.tokens - tile % share.columns * 8 * NT;
    return left < 8 * NT ? left : 8 * NT;
  }

  // Copies a unit's activations.
  __device__ __forceinline__ void activations(int unit, int slot) const {
    const int tile = unit / share.chunks, chunk = unit - tile * share.chunks, blocks = count(chunk), tokens = held(tile);
    const char* from = a.x + ((i64)(tile % share.columns) * 8 * NT * a.x_stride + chunk * span * 32) * 2;
    char* to = ring.slots + slot * ring.slot_bytes + span * 2 * (int)a.warps * BLOCK<FORMAT>;
    for (int t = lane; t < tokens; t += 32)
      copy(to + t * x_pitch<FORMAT>(span), from + t * a.x_stride * 2, blocks * 64, ring.full + slot);
#ifndef BULK
    barrier_copied(ring.full + slot);
#endif
  }

  __device__ __forceinline__ void run() const {
    const int first = share.end - share.begin < ring.depth ? share.end - share.begin : ring.depth;
    for (int i = 0; i < first; ++i) weights(share.begin + i, i);
    after_others();
    for (int i = 0; i < first; ++i) activations(share.begin + i, i);
    Turn turn;
    for (int unit = share.begin + first; unit < share.end; ++unit, turn.next(ring.depth)) {
      barrier_wait(ring.empty + turn.slot, turn.parity);
      weights(unit, turn.slot);
      activations(unit, turn.slot);
    }
  }
};

// A lane's weights of a block of 32 inputs in rows 2g and 2g+1 of a group, as bf16 for two products of 16 inputs: j, the
// lane's number among four, has inputs 8j…8j+7 or, with q8, 4j…4j+3 and 16+4j…16+4j+3.
// nibbles: 0x000f000f.
template <int FORMAT>
__device__ __forceinline__ void unpack_rows(
    const char* quants, const char* scales, int minima, u32 nibbles, u32 (*a)[4]) {
  const uint2 q = *(const uint2*)quants;
  const u32 both = *(const u32*)scales;
  if constexpr (FORMAT == 4) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // the scale in two parts, which make exact products with −8…7: only the sum of both is rounded
      const u32 scale = __float_as_uint(half_to_float((u16)(r ? both >> 16 : both)));
      const u32 rest = __float_as_uint(__uint_as_float(scale) - __uint_as_float(scale & 0xffff0000u));
      const u32 high = bytes_of(scale, scale, 0x3232), low = bytes_of(rest, rest, 0x3232);
      const u32 w = bytes_of(r ? q.y : q.x, 0, 0x3120);
      u32 pairs[4];  // inputs 0 1, 4 5, 2 3, 6 7
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const u32 v = add_bf16x2(w >> 4 * p & nibbles | 0x43004300u, 0xc308c308u);  // 128 + q − 136
        pairs[p] = fma_bf16x2(v, high, fma_bf16x2(v, low, 0x80008000u));
      }
      a[0][r] = pairs[0]; a[0][2 + r] = pairs[2];
      a[1][r] = pairs[1]; a[1][2 + r] = pairs[3];
    }
  } else {
    uint2 behind;
    u32 least = 0;
    if constexpr (FORMAT == 8) behind = *(const uint2*)(quants + 256);
    else least = *(const u32*)(scales + minima);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = half_to_float((u16)(r ? both >> 16 : both));
      const u32 word = r ? q.y : q.x;
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // 2²³ + a byte, as f32
        const u32 bytes = FORMAT == 8 ? (i ? r ? behind.y : behind.x : word) ^ 0x80808080u
                                      : (i ? word >> 4 : word) & 0x0f0f0f0fu;
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float whole = __uint_as_float(bytes_of(bytes, 0x4b000000u, 0x7440 + e)) - (FORMAT == 8 ? 8388736.f : 8388608.f);
          v[e] = FORMAT == 8 ? __fmul_rn(scale, whole)
                             : __fmaf_rn(scale, whole, half_to_float((u16)(r ? least >> 16 : least)));
        }
        a[i][r] = pair_of(v[0], v[1]);
        a[i][2 + r] = pair_of(v[2], v[3]);
      }
    }
  }
}

// A lane's activations of one token in a block of 32 inputs, for two products: the inputs of `unpack_rows`. ENDS: the
// inputs may end in the block, `left` of it are some.
template <int FORMAT, bool ENDS>
__device__ __forceinline__ uint4 activations(const char* x, int j, int left) {
  uint4 v;
  if constexpr (FORMAT == 8) {
    const uint2 first = *(const uint2*)(x + j * 8), second = *(const uint2*)(x + j * 8 + 32);
    v = make_uint4(first.x, first.y, second.x, second.y);
  } else {
    v = *(const uint4*)(x + j * 16);
  }
  if (ENDS) {
    u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = FORMAT == 8 ? 4 * j + (i & 1) * 2 + (i >> 1) * 16 : 8 * j + 2 * i;
      w[i] = at + 1 < left ? w[i] : at < left ? w[i] & 0xffffu : 0u;
    }
    v = make_uint4(w[0], w[1], w[2], w[3]);
  }
  return v;
}

// Adds a block of 32 inputs to sums[group][tile of 8 tokens][4].
template <int FORMAT, int NT, bool ENDS>
__device__ __forceinline__ void multiply(
    const char* quants, const char* scales, int span, const char* x, int j, int left, u32 nibbles,
    float (*sums)[NT][4]) {
  u32 w[2][2][4];
#pragma unroll
  for (int u = 0; u < 2; ++u)
    unpack_rows<FORMAT>(quants + u * span * BLOCK<FORMAT>, scales + u * span * BLOCK<FORMAT>, span * 32, nibbles, w[u]);
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    const uint4 v = activations<FORMAT, ENDS>(x + t * 8 * x_pitch<FORMAT>(span), j, left);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      mma(sums[u][t], w[u][0][0], w[u][0][1], w[u][0][2], w[u][0][3], v.x, v.y);
      mma(sums[u][t], w[u][1][0], w[u][1][1], w[u][1][2], w[u][1][3], v.z, v.w);
    }
  }
}

// Two neighbouring channels of a token. even: there are always two, which are read and written at once.
__device__ __forceinline__ void write_pair(
    const GemmArgs& a, i64 token, i64 channel, bool even, float first, float second) {
  const i64 at = token * a.y_stride + channel;
  const bool two = even || channel + 1 < a.n;
  if (a.residual) {
    const float* more = a.residual + token * a.residual_stride + channel;
    if (even) {
      const float2 both = *(const float2*)more;
      first += both.x; second += both.y;
    } else {
      first += more[0];
      if (two) second += more[1];
    }
  }
  if (a.y_bf16) {
    const u32 both = pair_of(first, second);
    u16* y = (u16*)a.y + at;
    if (even) { *(u32*)y = both; return; }
    y[0] = (u16)both;
    if (two) y[1] = (u16)(both >> 16);
  } else {
    if (even) { const float2 both = {first, second}; *(float2*)(a.y + at) = both; return; }
    a.y[at] = first;
    if (two) a.y[at + 1] = second;
  }
}

// What a multiplying warp does with the sums of a whole tile.
template <int NT>
__device__ __forceinline__ void write_tile(
    const GemmArgs& a, const Share& share, int tile, int warp, int lane, float (*sums)[NT][4]) {
  const int g = lane >> 2, j = lane & 3, own = tile / share.columns * (int)a.warps + warp;
  const int first = tile % share.columns * 8 * NT + 2 * j, left = share.tokens - first;
  const bool even = !((a.n | a.y_stride | a.residual_stride) & 1) && !(((u64)a.y | (u64)a.residual) & 7);
  if (a.second) {
    const i64 channel = (i64)own * 16 + 2 * g;
#pragma unroll 1
    for (int t = 0; t < NT; ++t) {  // the front tile of tokens, behind which the others move up: the code is there once
      float* gate = sums[0][0];
      const float* up = sums[1][0];
#pragma unroll
      for (int i = 0; i < 4; ++i) gate[i] = __fmul_rn(activated(gate[i], (int)a.act), up[i]);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (t * 8 + e < left && channel < a.n)
          write_pair(a, first + t * 8 + e, channel, even, gate[e], gate[2 + e]);
#pragma unroll
      for (int s = 0; s + 1 < NT; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) { sums[0][s][i] = sums[0][s + 1][i]; sums[1][s][i] = sums[1][s + 1][i]; }
    }
    return;
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const i64 channel = (i64)own * 32 + u * 16 + 2 * g;
    if (channel >= a.n) continue;
    const float bias = a.bias ? a.bias[channel] : 0.f, next = a.bias && channel + 1 < a.n ? a.bias[channel + 1] : 0.f;
#pragma unroll
    for (int t = 0; t < NT; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (t * 8 + e < left)
          write_pair(a, first + t * 8 + e, channel, even, sums[u][t][e] + bias, sums[u][t][2 + e] + next);
  }
}

// A warp's sums of its block's part of a tile → those of the whole tile, in the warp that is through last: true for that.
template <int NT>
__device__ __forceinline__ bool whole_tile(
    const GemmArgs& a, const Share& share, int tile, int warp, int lane, float (*sums)[NT][4]) {
  const int from = share.owner(tile * share.chunks), to = share.owner((tile + 1) * share.chunks - 1);
  if (from == to) return true;
  const int warps = (int)a.warps;
  auto part = [&](int block) { return a.sums + (((i64)block * 2 + (block == from)) * warps + warp) * 2 * NT * 32 + lane; };
  float4* mine = part(blockIdx.x);
  float* flat = &sums[0][0][0];
#pragma unroll
  for (int i = 0; i < 2 * NT; ++i) {
    const float4 v = {flat[4 * i], flat[4 * i + 1], flat[4 * i + 2], flat[4 * i + 3]};
    mine[i * 32] = v;
  }
  __threadfence();
  __syncwarp();
  int* count = a.counts + from * MULTIPLY + warp;
  int before = 0;
  if (lane == 0) before = atomicAdd(count, 1);
  if (__shfl_sync(0xffffffffu, before, 0) < to - from) return false;
  __threadfence();
  if (lane == 0) *count = 0;
#pragma unroll
  for (int i = 0; i < 8 * NT; ++i) flat[i] = 0.f;
  for (int block = from; block <= to; ++block) {
    const float4* theirs = part(block);
#pragma unroll
    for (int i = 0; i < 2 * NT; ++i) {
      const float4 v = from_others(theirs + i * 32);
      flat[4 * i] += v.x; flat[4 * i + 1] += v.y; flat[4 * i + 2] += v.z; flat[4 * i + 3] += v.w;
    }
  }
  return true;
}

// What the multiplying warps do. handed: [warps][8·NT][32], where two share channels.
template <int FORMAT, int NT>
__device__ __forceinline__ void tiles(const GemmArgs& a, const Share& share, const Ring& ring, float* handed, int number, int lane) {
  const int warps = (int)a.warps, warp = number % warps, turn_of = number / warps, turns = MULTIPLY / warps;
  const int g = lane >> 2, j = lane & 3, nblk = ((int)a.k + 31) / 32, span = (int)a.span;
  const int group = 2 * warp * span * BLOCK<FORMAT>;
  const int quants = group + j * 64 + g * 8, scales = group + span * QUANTS<FORMAT> + g * 4;
  const int x = 2 * warps * span * BLOCK<FORMAT> + g * x_pitch<FORMAT>(span);
  float* shared_sums = handed + (warp * 8 * NT) * 32 + lane;
  const u32 nibbles = in_register(0x000f000fu);
  Turn turn;
  after_others();
  for (int unit = share.begin; unit < share.end;) {
    const int tile = unit / share.chunks;
    int chunk = unit - tile * share.chunks;
    float sums[2][NT][4];
    float* flat = &sums[0][0][0];
#pragma unroll
    for (int i = 0; i < 8 * NT; ++i) flat[i] = 0.f;
    for (; unit < share.end && chunk < share.chunks; ++unit, ++chunk) {
      if (unit + 1 == share.end) let_others_start();
      const int blocks = nblk - chunk * span < span ? nblk - chunk * span : span;
      const char* slot = ring.slots + turn.slot * ring.slot_bytes;
      barrier_wait(ring.full + turn.slot, turn.parity);
      const int left = (int)a.k - chunk * span * 32;
      const char* q = slot + quants;
      int b = turn_of;
      if (left >= blocks * 32)
        for (; b + turns < blocks; b += 2 * turns)  // one's weights are unpacked while the other's are multiplied
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = b + i * turns;
            multiply<FORMAT, NT, false>(q + at * QUANTS<FORMAT>, slot + scales + at * 32, span, slot + x + at * 64, j, 32,
                                        nibbles, sums);
          }
      for (; b < blocks; b += turns)
        multiply<FORMAT, NT, true>(q + b * QUANTS<FORMAT>, slot + scales + b * 32, span, slot + x + b * 64, j,
                                   left - b * 32, nibbles, sums);
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.empty + turn.slot);
      turn.next(ring.depth);
    }
    if (turns > 1) {
      if (turn_of)
#pragma unroll
        for (int i = 0; i < 8 * NT; ++i) shared_sums[i * 32] = flat[i];
      meet(1 + warp, 64);
      if (!turn_of)
#pragma unroll
        for (int i = 0; i < 8 * NT; ++i) flat[i] += shared_sums[i * 32];
      meet(1 + warp, 64);
      if (turn_of) continue;
    }
    if (whole_tile<NT>(a, share, tile, warp, lane, sums)) write_tile<NT>(a, share, tile, warp, lane, sums);
  }
}

template <int FORMAT, int NT>
__device__ __forceinline__ void gemm(const GemmArgs& a) {
  SHARED_BYTES(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Share share = share_of(a, 8 * NT);
  if (share.begin >= share.end) { after_others(); return; }
  float* handed = (float*)(shared + HEAD);
  const int room = a.warps < MULTIPLY ? (int)a.warps * 8 * NT * 32 * 4 : 0;
  const Ring ring{shared + HEAD + room, (u64*)shared, (u64*)shared + 8, (int)a.slot_bytes, (int)a.depth};
  if ((int)threadIdx.x < ring.depth) {
    barrier_make(ring.full + threadIdx.x, FILLERS);
    barrier_make(ring.empty + threadIdx.x, MULTIPLY);
    barriers_made();
  }
  __syncthreads();
  if (warp == MULTIPLY) {
    const Filler<FORMAT, NT> filler{a, share, ring, lane, ((int)a.k + 31) / 32, (int)a.span};
    filler.run();
  } else {
    tiles<FORMAT, NT>(a, share, ring, handed, warp, lane);
  }
}

#define GEMM(name, format, nt) \
  extern "C" __global__ void __launch_bounds__(288, 1) name(GemmArgs a) { gemm<format, nt>(a); }

GEMM(gemm_q4_2, 4, 2)
GEMM(gemm_q4_4, 4, 4)
GEMM(gemm_q4_8, 4, 8)
GEMM(gemm_q4m_2, 5, 2)
GEMM(gemm_q4m_4, 5, 4)
GEMM(gemm_q4m_8, 5, 8)
GEMM(gemm_q8_2, 8, 2)
GEMM(gemm_q8_4, 8, 4)
GEMM(gemm_q8_8, 8, 8)
