// y = x·wᵀ (+ bias) (+ residual) of bf16 activations for some more tokens: weights are unpacked in registers, rounded to
// bf16, and meet tiles of tokens on tensor cores. Of q4 the scales are rounded, too: unpacking takes as long as products.
//
// A tile is 32 channels for each of `warps` warps and 8·NT tokens, 128 at most where four warps multiply together, else
// 64. With fewer than eight such warps, two share channels and take turns with the inputs: the second one hands its sums
// to the first. Four more warps fill a ring in shared memory with weights and activations; weights are on their way while
// the kernel before ends.
//
// All tiles' inputs, in slots of the ring, are dealt out to the blocks as evenly as can be, one tile behind the other. A
// tile that several blocks have a part in is added up, in their order, by the last that is through.
//
// With `act`, a warp's channels are 16 of the gate and the same 16 of up: y = act(gate)·up.

struct GemmArgs {
  const char* w;             // rows of the first group
  i64 n, k;                  // channels (of y), inputs
  i64 second;                // groups from gate to up; 0: none
  const char* x;             // bf16, in tiles (`in_tiles`)
  i64 x_rows;                // tokens of a piece
  float* y;
  i64 y_stride, y_as;        // as `put_some` takes them
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
#ifdef BULK
constexpr int ARRIVALS = 32 * FILL + 1;  // that make a slot full: of each filling lane, and of the one that copies inputs
#else
constexpr int ARRIVALS = 32 * FILL;
#endif

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

// What a filling warp does. A slot: activations, then weights, of one group of 16 channels after the other. Activations
// are there in the order in which they are read.
template <int FORMAT, int NT>
struct Filler {
  static constexpr int EACH = 2 * MULTIPLY / FILL;        // groups of a warp, at most
  static constexpr int PARTS = FORMAT == 5 ? 2 : 1;       // behind the quants
  const GemmArgs& a;
  const Share& share;
  const Ring& ring;
  int warp, lane, nblk;
  int groups;                  // of this warp
  int tile, chunk;             // weights: of the unit whose turn it is
  int x_tile, x_chunk;         // activations
  const char* quants[EACH];    // this lane's first ones
  const char* scales;

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
#ifdef BULK
    barrier_copied(ring.full + slot);
#endif
    if (++chunk == share.chunks) { chunk = 0; ++tile; aim(); }
  }

  // Copies the next unit's activations.
  __device__ __forceinline__ void inputs(int slot) {
    const int first = x_tile % share.columns * 8 * NT, piece = x_chunk * (SPAN / 2);
    const int bytes = ((int)a.x_rows - first < 8 * NT ? (int)a.x_rows - first : 8 * NT) * 128;
    const int pieces = nblk / 2 - piece < SPAN / 2 ? nblk / 2 - piece : SPAN / 2;
    const char* from = a.x + (piece * a.x_rows + first) * 128;
    char* to = ring.slots + slot * ring.slot_bytes;
    if (++x_chunk == share.chunks) { x_chunk = 0; ++x_tile; }
#ifdef BULK
    if (threadIdx.x != 32 * MULTIPLY) return;
    barrier_expect(ring.full + slot, pieces * bytes);
    for (int i = 0; i < pieces; ++i)
      bulk_ahead(to + i * 8 * NT * 128, from + i * a.x_rows * 128, bytes, ring.full + slot);
#else
    for (int i = 0; i < pieces; ++i)
      for (int at = (warp * 32 + lane) * 16; at < bytes; at += FILL * 512)
        copy_ahead(to + i * 8 * NT * 128 + at, from + i * a.x_rows * 128 + at, true);
    barrier_copied(ring.full + slot);
#endif
  }

  __device__ __forceinline__ void run() {
    const int units = share.end - share.begin, first = units < ring.depth ? units : ring.depth;
    groups = 2 * (int)a.warps / FILL;
    tile = x_tile = share.begin / share.chunks;
    chunk = x_chunk = share.begin - tile * share.chunks;
    aim();
    for (int i = 0; i < first; ++i) weights(i);
    after_others();
    for (int i = 0; i < first; ++i) inputs(i);
    Turn turn;
    for (int i = first; i < units; ++i, turn.next(ring.depth)) {
      barrier_wait(ring.empty + turn.slot, turn.parity);
      weights(turn.slot);
      inputs(turn.slot);
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

// One of the two rows, r. nibbles: 0x000f000f; a: [product][4].
template <int FORMAT>
__device__ __forceinline__ void unpack_row(const Rows& rows, int r, u32 nibbles, u32 (*a)[4]) {
  const float scale = half_to_float((u16)(r ? rows.scales >> 16 : rows.scales));
  const u32 word = r ? rows.q.y : rows.q.x;
  if constexpr (FORMAT == 4) {
    const u32 both = pair_of(scale, scale), w = bytes_of(word, 0, 0x3120);
    u32 pairs[4];  // inputs 0 1, 4 5, 2 3, 6 7
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const u32 v = add_bf16x2(w >> 4 * p & nibbles | 0x43004300u, 0xc308c308u);  // 128 + q − 136
      pairs[p] = fma_bf16x2(v, both, 0x80008000u);
    }
    a[0][r] = pairs[0]; a[0][2 + r] = pairs[2];
    a[1][r] = pairs[1]; a[1][2 + r] = pairs[3];
  } else {
    const float least = FORMAT == 5 ? half_to_float((u16)(r ? rows.minima >> 16 : rows.minima)) : 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 2²³ + a byte, as f32
      const u32 bytes = FORMAT == 8 ? (i ? r ? rows.behind.y : rows.behind.x : word) ^ 0x80808080u
                                    : (i ? word >> 4 : word) & 0x0f0f0f0fu;
      float v[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float whole = __uint_as_float(bytes_of(bytes, 0x4b000000u, 0x7440 + e)) - (FORMAT == 8 ? 8388736.f : 8388608.f);
        v[e] = FORMAT == 8 ? __fmul_rn(scale, whole) : __fmaf_rn(scale, whole, least);
      }
      a[i][r] = pair_of(v[0], v[1]);
      a[i][2 + r] = pair_of(v[2], v[3]);
    }
  }
}

template <int FORMAT>
__device__ __forceinline__ void unpack_rows(const Rows* rows, u32 nibbles, u32 (*w)[2][4]) {
#pragma unroll
  for (int q = 0; q < 4; ++q) unpack_row<FORMAT>(rows[q & 1], q >> 1, nibbles, w[q & 1]);
}

#ifndef WGMMA
struct SharedRows {
  const char* at;
  int chunk;
};
__device__ __forceinline__ SharedRows shared_rows(const char* at, int chunk) { return {at, chunk}; }
#endif

// Adds a block of 32 inputs to sums[group][tile of 8 tokens][4]. w: [group][product][4]; x: of the slot; at: bytes from
// there to the block's inputs. Meanwhile the next block's weights, if there is one, are unpacked to `w_next`: while it waits
// for tensor cores to begin a product a warp does nothing else, so both are mixed. Products of two blocks may be under way,
// until `products_but<0>`; those that used w_next are through when it is written.
template <int FORMAT, int NT>
__device__ __forceinline__ void multiply(
    float (*sums)[NT][4], u32 (*w)[2][4], SharedRows x, int at, bool more, const Rows* next, u32 nibbles, u32 (*w_next)[2][4]) {
#ifdef WGMMA
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    products_begin();
    wgmma<NT>(&sums[q & 1][0][0], w[q & 1][q >> 1], x + (at >> 4) + (q >> 1) * 2);
    products_end();
    if (q == 0) products_but<1>();
    if (more) unpack_row<FORMAT>(next[q & 1], q >> 1, nibbles, w_next[q & 1]);
  }
#else
#pragma unroll
  for (int t = 0; t < NT; ++t) {
    u32 v[4];
    load_matrices(v, x.at + (at & ~127) + t * 1024, x.chunk + (at >> 4 & 4));
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      mma(sums[u][t], w[u][0][0], w[u][0][1], w[u][0][2], w[u][0][3], v[0], v[1]);
      mma(sums[u][t], w[u][1][0], w[u][1][1], w[u][1][2], w[u][1][3], v[2], v[3]);
    }
  }
  if (more) unpack_rows<FORMAT>(next, nibbles, w_next);
#endif
}

// Where two neighbouring channels of a lane's tokens are written, and what is added to them: token first + 8·t + e is at
// to[e] + t·step. Without `even` one of the two may be missing, or lie where two can't be written at once.
template <int NT>
struct Writer {
  static constexpr int AT_ONCE = NT < 4 ? NT : 4;
  const GemmArgs& a;
  int first, left;
  bool even;

  __device__ __forceinline__ Writer(const GemmArgs& a, const Share& share, int tile, int j) : a(a) {
    first = tile % share.columns * 8 * NT + 2 * j;
    left = share.tokens - first;
    even = !((a.n | a.y_stride | a.residual_stride) & 1) && !(((u64)a.y | (u64)a.residual) & 7);
  }

  __device__ __forceinline__ void one_by_one(i64 channel, const float* sums, float bias, float next) const {
#pragma unroll 1
    for (int i = 0; i < 2 * NT; ++i) {
      const i64 token = first + (i >> 1) * 8 + (i & 1);
      float v[2] = {bias, next};
#pragma unroll
      for (int t = 0; t < 2 * NT; ++t)  // registers can't be indexed
        if (t == i) { v[0] += sums[(t >> 1) * 4 + (t & 1)]; v[1] += sums[(t >> 1) * 4 + 2 + (t & 1)]; }
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if ((i >> 1) * 8 + (i & 1) < left && channel + e < a.n) {
          if (a.residual) v[e] += a.residual[token * a.residual_stride + channel + e];
          put_one(a.y, token, channel + e, a.y_stride, a.y_as, v[e]);
        }
    }
  }

  // sums: [NT][4], of a group of channels
  __device__ __forceinline__ void write(i64 channel, const float* sums, float bias, float next) const {
    if (channel >= a.n) return;
    if (!even) { one_by_one(channel, sums, bias, next); return; }
    char* to[2];
    const float* more[2];
    const int size = a.y_as ? 2 : 4;
    const i64 step = a.y_as > 1 ? 1024 : 8 * a.y_stride * size, more_step = 8 * a.residual_stride;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const i64 token = first + e;
      to[e] = (char*)a.y + place_of(token, channel, a.y_stride, a.y_as) * size;
      more[e] = a.residual + token * a.residual_stride + channel;
    }
#pragma unroll
    for (int begin = 0; begin < NT; begin += AT_ONCE) {
      float2 added[AT_ONCE][2];  // all on their way before a result is written, which may take the place of one
#pragma unroll
      for (int t = 0; t < AT_ONCE; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          added[t][e].x = bias; added[t][e].y = next;
          if (a.residual && (begin + t) * 8 + e < left) {
            const float2 both = *(const float2*)(more[e] + (begin + t) * more_step);
            added[t][e].x += both.x; added[t][e].y += both.y;
          }
        }
#pragma unroll
      for (int t = 0; t < AT_ONCE; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if ((begin + t) * 8 + e < left) {
            const float* own = sums + (begin + t) * 4 + e;
            const float2 both = {own[0] + added[t][e].x, own[2] + added[t][e].y};
            char* there = to[e] + (begin + t) * step;
            if (a.y_as) *(u32*)there = pair_of(both.x, both.y);
            else *(float2*)there = both;
          }
    }
  }
};

// What a multiplying warp does with the sums of a whole tile.
template <int NT>
__device__ __forceinline__ void write_tile(
    const GemmArgs& a, const Share& share, int tile, int warp, int lane, float (*sums)[NT][4]) {
  const int g = lane >> 2, own = tile / share.columns * (int)a.warps + warp;
  const Writer<NT> writer(a, share, tile, lane & 3);
  if (a.second) {
    float* gate = &sums[0][0][0];
    const float* up = &sums[1][0][0];
    if (a.act == 1) {
#pragma unroll
      for (int i = 0; i < 4 * NT; ++i) gate[i] = silu(gate[i]);
    } else {
#pragma unroll 1
      for (int t = 0; t < NT; ++t) {  // the front one, which then goes behind all others: the code is there once
        float done[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) done[i] = activated(gate[i], (int)a.act);
#pragma unroll
        for (int i = 0; i + 4 < 4 * NT; ++i) gate[i] = gate[i + 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) gate[4 * NT - 4 + i] = done[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * NT; ++i) gate[i] = __fmul_rn(gate[i], up[i]);
    writer.write((i64)own * 16 + 2 * g, gate, 0.f, 0.f);
    return;
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const i64 channel = (i64)own * 32 + u * 16 + 2 * g;
    const float bias = a.bias && channel < a.n ? a.bias[channel] : 0.f;
    const float next = a.bias && channel + 1 < a.n ? a.bias[channel + 1] : 0.f;
    writer.write(channel, &sums[u][0][0], bias, next);
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

// What the multiplying warps do. TURNS: warps that share channels: each has every other block then. handed:
// [warps][8·NT][32], for their sums.
template <int FORMAT, int NT, int TURNS>
__device__ __forceinline__ void tiles(const GemmArgs& a, const Share& share, const Ring& ring, float* handed, int number, int lane) {
  constexpr int WARPS = MULTIPLY / TURNS, MINE = SPAN / TURNS;  // blocks of a slot
  const int warp = number % WARPS, turn_of = number / WARPS;
  const int g = lane >> 2, j = lane & 3, nblk = ((int)a.k + 31) / 32;
  const int group = SPAN * 8 * NT * 64 + 2 * warp * SPAN * BLOCK<FORMAT>;
  const int quants = group + turn_of * QUANTS<FORMAT> + j * 64 + g * 8;
  const int scales = group + SPAN * QUANTS<FORMAT> + turn_of * 32 + g * 4;
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
    u64* behind = 0;  // of the slot before, of which the last products may be under way
    u32 w[2][2][2][4];
    bool ahead = false;  // whether the slot is known to be full, and its first block is unpacked: slower in small tiles
    for (; unit < share.end && chunk < share.chunks; ++unit, ++chunk) {
      if (unit + 1 == share.end) let_others_start();
      const char* slot = ring.slots + turn.slot * ring.slot_bytes;
      const SharedRows x = shared_rows(slot, turn_of * 4);
      const bool whole = nblk - chunk * SPAN >= SPAN;
      u64* const empty = ring.empty + turn.slot;
      Rows rows[2];
      auto load = [&](int i) {
#pragma unroll
        for (int u = 0; u < 2; ++u)
          rows[u] = rows_of<FORMAT>(slot + quants + u * SPAN * BLOCK<FORMAT> + i * TURNS * QUANTS<FORMAT>,
                                    slot + scales + u * SPAN * BLOCK<FORMAT> + i * TURNS * 32, SPAN * 32);
      };
      auto add = [&](int i, bool more) {
        const int b = i * TURNS;
        multiply<FORMAT, NT>(sums, w[i & 1], x, (b >> 1) * (8 * NT * 128) + (b & 1) * 64, more, rows, nibbles, w[~i & 1]);
      };
      if (!ahead) {
        barrier_wait(ring.full + turn.slot, turn.parity);
        load(0);
        unpack_rows<FORMAT>(rows, nibbles, w[0]);
      }
      turn.next(ring.depth);
      if (MINE > 2 || whole) load(1);
      add(0, MINE > 2 || whole);
      if (behind && lane == 0) barrier_arrive(behind);
      behind = empty;
      ahead = false;
      if (whole) {
#pragma unroll
        for (int i = 1; i + 1 < MINE; ++i) {
          load(i + 1);
          add(i, true);
        }
        ahead = NT > 8 && unit + 1 < share.end && chunk + 1 < share.chunks;
        if (ahead) {
          slot = ring.slots + turn.slot * ring.slot_bytes;
          barrier_wait(ring.full + turn.slot, turn.parity);
          load(0);
        }
        add(MINE - 1, ahead);
      } else {
        if (MINE > 2) add(1, false);
        products_but<0>();
      }
      // with so many sums the compiler waits behind each product if some are under way from slot to slot
      if (NT > 8) products_but<0>();
    }
    products_but<0>();
    __syncwarp();
    if (lane == 0) barrier_arrive(behind);
    if (TURNS > 1) {
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
    if (NT > 8) fewer_registers<40>();
    Filler<FORMAT, NT> filler{a, share, ring, warp - MULTIPLY, lane, ((int)a.k + 31) / 32};
    filler.run();
  } else if constexpr (NT > 8) {
    more_registers<232>();
    tiles<FORMAT, NT, 1>(a, share, ring, handed, warp, lane);
  } else {
    if (a.warps < MULTIPLY) tiles<FORMAT, NT, 2>(a, share, ring, handed, warp, lane);
    else tiles<FORMAT, NT, 1>(a, share, ring, handed, warp, lane);
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
#if defined(WGMMA) || defined(EMULATED)  // elsewhere a thread has no room for so many sums
GEMM(gemm_q4_16, 4, 16)
GEMM(gemm_q4m_16, 5, 16)
GEMM(gemm_q8_16, 8, 16)
#endif
