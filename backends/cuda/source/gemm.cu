// y = x·wᵀ (+ bias) (+ residual) of bf16 activations for some more tokens: weights are unpacked in registers, to the bf16
// that `unpack` makes of them, and meet tiles of tokens on tensor cores.
//
// A tile is 32 channels for each of `warps` warps and 8·NT tokens. With fewer than eight such warps, two share channels
// and take turns with the inputs: the second one hands its sums to the first. Four more warps fill a ring in shared
// memory with weights and activations; weights are on their way while the kernel before ends.
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
  i64 slot_bytes, depth;     // of the ring
  int* counts;               // [blocks][8], zeros: parts that are through of the tile that begins in a block and ends in another
  float4* sums;              // [blocks][2][warps][2·NT][32]: of a tile that began in a block before, or in this one
};

constexpr int MULTIPLY = 8, FILL = 4;  // warps; those that fill are behind those that multiply
constexpr int SPAN = 4;                // blocks of 32 inputs in one slot of the ring
constexpr int FRONT = 1024;            // bytes of shared memory for barriers: slots begin at whole 1024 bytes
// Arrivals that make a slot full: of each filling lane when its copies are there, and of each filling warp when its
// activations are.
constexpr int ARRIVALS = FILL * 33;

// A block's share of the work. A unit: a slot's inputs of one tile.
struct Share {
  int chunks, each;      // units of a tile, of a block
  int tokens, columns;   // in this step; tiles of them
  int begin, end;        // units of this block
  __device__ __forceinline__ int owner(int unit) const { return unit / each; }
};

__device__ __forceinline__ Share share_of(const GemmArgs& a, int width) {
  Share s;
  const int nblk = ((int)a.k + 31) / 32, wide = (int)a.warps * (a.second ? 16 : 32);
  s.chunks = (nblk + SPAN - 1) / SPAN;
  s.tokens = (int)from_host(a.rows);
  s.columns = (s.tokens + width - 1) / width;
  const int all = ((int)a.n + wide - 1) / wide * s.columns * s.chunks;
  s.each = (all + (int)gridDim.x - 1) / (int)gridDim.x;
  s.begin = (int)blockIdx.x * s.each;
  s.end = s.begin + s.each < all ? s.begin + s.each : all;
  return s;
}

// What a filling warp does. A slot: activations, then weights, of one group of 16 channels after the other.
//
// Activations lie in pieces of 64 inputs, in each of which a token has 128 bytes; 16-byte chunk c of token t is at c ^ t % 8
// there, as tensor cores take it. A chunk has two inputs of each of the four lanes that share a row, in the order in which
// `unpack_rows` has them: for the first product of a block chunks 0 and 1, for the second one 2 and 3.
template <int FORMAT, int NT>
struct Filler {
  static constexpr int EACH = 2 * MULTIPLY / FILL;        // groups of a warp, at most
  static constexpr int PARTS = FORMAT == 5 ? 2 : 1;       // behind the quants
  static constexpr int ROWS = 4 * FILL, AT_ONCE = 8 * NT / ROWS;  // rows of 128 bytes that all copy at once; of a piece
  static constexpr int PIECES = 2 * AT_ONCE;              // of 16 bytes, of a lane
  const GemmArgs& a;
  const Share& share;
  const Ring& ring;
  int warp, lane, nblk;
  int groups;                  // of this warp
  int tile, chunk;             // weights: of the unit whose turn it is
  const char* quants[EACH];    // this lane's first ones
  const char* scales;
  int x_tile, x_chunk, left;   // activations: of the unit to be read next; inputs left in the one that is in `x`
  uint4 x[PIECES];

  // Weights of a tile.
  __device__ __forceinline__ void aim() {
    const int row = tile / share.columns, warps = (int)a.warps;
    const int last = (int)((a.second ? a.second + a.second : (a.n + 15) / 16) - 1);
    const i64 size = group_bytes(nblk, FORMAT);
    auto source = [&](int u) {  // group u: the half u & 1 of warp u / 2
      const int group = a.second ? row * warps + (u >> 1) + (u & 1) * (int)a.second : row * 2 * warps + u;
      return a.w + size * (group < last ? group : last);
    };
#pragma unroll
    for (int i = 0; i < EACH; ++i) quants[i] = source(warp * groups + i) + lane * 16;
    const int own = lane >> 3 < groups ? lane >> 3 : groups - 1;
    scales = source(warp * groups + own) + (i64)nblk * QUANTS<FORMAT> + (lane & 7) * 16;
  }

  // Copies the next unit's weights: for each group of 16 channels quants, scales and, with q4m, minima.
  __device__ __forceinline__ void weights(int slot) {
    const int blocks = nblk - chunk * SPAN;
    const int from = chunk * SPAN * QUANTS<FORMAT>;
    u64* full = ring.full + slot;
    char* to = ring.slots + slot * ring.slot_bytes + SPAN * 8 * NT * 64 + warp * groups * SPAN * BLOCK<FORMAT>;
    char* there = to + lane * 16;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (i < groups)
#pragma unroll
        for (int c = 0; c < SPAN * QUANTS<FORMAT>; c += 512)
          if (c + lane * 16 < blocks * QUANTS<FORMAT>)
            copy_ahead(there + i * SPAN * BLOCK<FORMAT> + c, quants[i] + from + c, true);
    if (lane >> 3 < groups && (lane & 7) < blocks * 2)
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        copy_ahead(to + (lane >> 3) * SPAN * BLOCK<FORMAT> + SPAN * (QUANTS<FORMAT> + part * 32) + (lane & 7) * 16,
                   scales + (i64)nblk * part * 32 + chunk * SPAN * 32, true);
    barrier_copied(full);
    if (++chunk == share.chunks) { chunk = 0; ++tile; aim(); }
  }

  // Begins to read the next unit's activations: row by row, a lane's chunk in its row is always the same.
  __device__ __forceinline__ void read() {
    const int row = warp * 4 + (lane >> 3), c = lane & 7, first = x_tile % share.columns * 8 * NT;
    const int tokens = share.tokens - first - row;
    const i64 stride = a.x_stride * 2;
    const char* from = a.x + (first + row) * stride + x_chunk * SPAN * 64 + c * 16;
    left = (int)a.k - x_chunk * SPAN * 32;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i, from += ROWS * stride)
#pragma unroll
      for (int piece = 0; piece < 2; ++piece)
        if (i * ROWS < tokens && piece * 64 + c * 8 < left)
          x[piece * AT_ONCE + i] = from_others((const uint4*)(from + piece * 128));
    if (++x_chunk == share.chunks) { x_chunk = 0; ++x_tile; }
  }

  // Writes them; zeros for what lies behind the inputs.
  __device__ __forceinline__ void write(int slot) {
    const int row = warp * 4 + (lane >> 3), c = lane & 7;
    if (left < SPAN * 32)
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        const int some = left - i / AT_ONCE * 64 - c * 8;
        u32 w[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) w[e] = 2 * e + 1 < some ? w[e] : 2 * e < some ? w[e] & 0xffffu : 0u;
        x[i] = make_uint4(w[0], w[1], w[2], w[3]);
      }
    char* to = ring.slots + slot * ring.slot_bytes + row * 128;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int into = FORMAT == 8 ? (c & 6) + (e & 1) : (c & 4) + e, of = FORMAT == 8 ? (c & 1) * 2 + (e >> 1) : c & 3;
      char* there = to + ((into ^ (row & 7)) << 4) + of * 4;
#pragma unroll
      for (int i = 0; i < PIECES; ++i)
        *(u32*)(there + i * ROWS * 128) = e == 0 ? x[i].x : e == 1 ? x[i].y : e == 2 ? x[i].z : x[i].w;
    }
    written_for_tensor_cores();
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.full + slot);
  }

  __device__ __forceinline__ void run() {
    const int units = share.end - share.begin, first = units < ring.depth ? units : ring.depth;
    groups = 2 * (int)a.warps / FILL;
    tile = x_tile = share.begin / share.chunks;
    chunk = x_chunk = share.begin - tile * share.chunks;
    aim();
    for (int i = 0; i < first; ++i) weights(i);
    after_others();
    read();
    Turn turn;
#pragma unroll 1
    for (int i = 0; i < units; ++i, turn.next(ring.depth)) {
      if (i >= first) {
        barrier_wait(ring.empty + turn.slot, turn.parity ^ 1);
        weights(turn.slot);
      }
      write(turn.slot);
      if (i + 1 < units) read();
    }
  }
};

// A lane's weights of a block of 32 inputs in rows 2g and 2g+1 of a group, as bf16 for two products of 16 inputs: j, the
// lane's number among four, has inputs 8j…8j+7 or, with q8, 4j…4j+3 and 16+4j…16+4j+3.
struct Rows {
  uint2 q, behind;  // behind: q8's second half
  u32 scales, minima;
};

template <int FORMAT>
__device__ __forceinline__ Rows rows_of(const char* quants, const char* scales, int minima) {
  Rows r;
  r.q = *(const uint2*)quants;
  r.scales = *(const u32*)scales;
  if constexpr (FORMAT == 8) r.behind = *(const uint2*)(quants + 256);
  if constexpr (FORMAT == 5) r.minima = *(const u32*)(scales + minima);
  return r;
}

// nibbles: 0x000f000f.
template <int FORMAT>
__device__ __forceinline__ void unpack_rows(const Rows& rows, u32 nibbles, u32 (*a)[4]) {
  const uint2 q = rows.q;
  const u32 both = rows.scales;
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
    const uint2 behind = rows.behind;
    const u32 least = rows.minima;
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

// Adds a block of 32 inputs to sums[group][tile of 8 tokens][4]; with WGMMA while the threads go on, until
// `products_but<N>` says that all but the last N blocks are through. w: [group][product][4]; x: the block's piece of 64
// inputs; half: which half of it.
template <int NT>
__device__ __forceinline__ void multiply(float (*sums)[NT][4], u32 (*w)[2][4], const char* x, int half) {
#ifdef WGMMA
  products_begin();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma<NT>(&sums[i & 1][0][0], w[i & 1][i >> 1], x + half * 64 + (i >> 1) * 32);
  products_end();
#else
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    u32 v[4];
    load_matrices(v, x + t * 1024, half * 4);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      mma(sums[u][t], w[u][0][0], w[u][0][1], w[u][0][2], w[u][0][3], v[0], v[1]);
      mma(sums[u][t], w[u][1][0], w[u][1][1], w[u][1][2], w[u][1][3], v[2], v[3]);
    }
  }
#endif
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
  const int g = lane >> 2, j = lane & 3, nblk = ((int)a.k + 31) / 32;
  const int group = SPAN * 8 * NT * 64 + 2 * warp * SPAN * BLOCK<FORMAT>;
  const int quants = group + j * 64 + g * 8, scales = group + SPAN * QUANTS<FORMAT> + g * 4;
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
      const int blocks = nblk - chunk * SPAN < SPAN ? nblk - chunk * SPAN : SPAN;
      const char* slot = ring.slots + turn.slot * ring.slot_bytes;
      barrier_wait(ring.full + turn.slot, turn.parity);
      auto load = [&](int b, Rows* rows) {
#pragma unroll
        for (int u = 0; u < 2; ++u)
          rows[u] = rows_of<FORMAT>(slot + quants + u * SPAN * BLOCK<FORMAT> + b * QUANTS<FORMAT>,
                                    slot + scales + u * SPAN * BLOCK<FORMAT> + b * 32, SPAN * 32);
      };
      auto add = [&](int b, const Rows* rows, u32 (*w)[2][4]) {
#pragma unroll
        for (int u = 0; u < 2; ++u) unpack_rows<FORMAT>(rows[u], nibbles, w[u]);
        multiply<NT>(sums, w, slot + (b >> 1) * (8 * NT * 128), b & 1);
      };
      int b = turn_of;
      for (; b + turns < blocks; b += 2 * turns) {  // one's weights are unpacked while the other's are multiplied
        Rows rows[2][2];
        u32 w[2][2][2][4];
        load(b, rows[0]);
        load(b + turns, rows[1]);
        add(b, rows[0], w[0]);
        products_but<1>();
        add(b + turns, rows[1], w[1]);
        products_but<1>();
      }
      if (b < blocks) {
        Rows rows[2];
        u32 w[2][2][4];
        load(b, rows);
        add(b, rows, w);
      }
      products_but<0>();
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
  SHARED_BYTES_AT(shared, 1024);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Share share = share_of(a, 8 * NT);
  if (share.begin >= share.end) { after_others(); return; }
  float* handed = (float*)(shared + FRONT);
  const int room = a.warps < MULTIPLY ? (int)a.warps * 8 * NT * 32 * 4 : 0;
  const Ring ring{shared + FRONT + room, (u64*)shared, (u64*)shared + 8, (int)a.slot_bytes, (int)a.depth};
  if ((int)threadIdx.x < ring.depth) {
    barrier_make(ring.full + threadIdx.x, ARRIVALS);
    barrier_make(ring.empty + threadIdx.x, MULTIPLY);
    barriers_made();
  }
  __syncthreads();
  if (warp >= MULTIPLY) {
    Filler<FORMAT, NT> filler{a, share, ring, warp - MULTIPLY, lane, ((int)a.k + 31) / 32};
    filler.run();
  } else {
    tiles<FORMAT, NT>(a, share, ring, handed, warp, lane);
  }
}

#define GEMM(name, format, nt) \
  extern "C" __global__ void __launch_bounds__(384, 1) name(GemmArgs a) { gemm<format, nt>(a); }

GEMM(gemm_q4_2, 4, 2)
GEMM(gemm_q4_4, 4, 4)
GEMM(gemm_q4_8, 4, 8)
GEMM(gemm_q4m_2, 5, 2)
GEMM(gemm_q4m_4, 5, 4)
GEMM(gemm_q4m_8, 5, 8)
GEMM(gemm_q8_2, 8, 2)
GEMM(gemm_q8_4, 8, 4)
GEMM(gemm_q8_8, 8, 8)
