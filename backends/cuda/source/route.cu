// Mixtures of experts: which experts a token goes to. Pair p is choice p % top_k of token p / top_k.

struct RouteArgs {
  const float* x;
  i64 x_stride;
  const float* bias;   // 0: none; for the choice only
  float* y;            // [rows][top_k numbers, top_k weights]
  i64 y_stride, experts, top_k;
  i64 softmax, normalise, groups, top_groups, two;  // two: a group's score is the sum of its two best
  double scale;
  const i64* rows;
};

// Experts outside of the best groups get -inf; of equal groups those of lower number are better. room: a number a group.
__device__ __forceinline__ void keep_best_groups(const RouteArgs& a, float* choice, float* room, int lane) {
  const int groups = (int)a.groups, size = (int)a.experts / groups;
  for (int g = lane; g < groups; g += 32) {
    float best = -INFINITE, second = -INFINITE;
    for (int i = g * size; i < (g + 1) * size; ++i) {
      const float v = choice[i];
      if (v > best) { second = best; best = v; }
      else second = fmaxf(second, v);
    }
    room[g] = a.two && size > 1 ? __fadd_rn(best, second) : best;
  }
  __syncwarp();
  for (int g = lane; g < groups; g += 32) {
    int better = 0;
    for (int h = 0; h < groups; ++h) better += room[h] > room[g] || (room[h] == room[g] && h < g);
    if (better >= a.top_groups)
      for (int i = g * size; i < (g + 1) * size; ++i) choice[i] = -INFINITE;
  }
}

// A warp a token. NaN counts as -inf.
extern "C" __global__ void __launch_bounds__(32) route(RouteArgs a) {
  SHARED_BYTES(words);
  let_others_start();
  after_others();
  const i64 row = blockIdx.x;
  if (row >= *a.rows) return;
  const int experts = (int)a.experts, top_k = (int)a.top_k, lane = threadIdx.x;
  float *scores = (float*)words, *choice = scores + experts, *room = choice + experts;
  const float* x = a.x + row * a.x_stride;
  float top = -INFINITE, total = 0.f;
  if (a.softmax) {
    for (int e = lane; e < experts; e += 32) top = fmaxf(top, x[e]);
    top = warp_max(top);
  }
  for (int e = lane; e < experts; e += 32) {
    scores[e] = a.softmax ? expf(x[e] - top) : __fdiv_rn(1.f, 1.f + expf(-x[e]));
    total += scores[e];
  }
  total = warp_sum(total);
  for (int e = lane; e < experts; e += 32) {
    if (a.softmax) scores[e] = __fdiv_rn(scores[e], total);
    const float v = a.bias ? __fadd_rn(scores[e], a.bias[e]) : scores[e];
    choice[e] = v == v ? v : -INFINITE;
  }
  __syncwarp();
  if (a.groups > 1) keep_best_groups(a, choice, room, lane);
  __syncwarp();
  float* y = a.y + row * a.y_stride;
  float sum = 0.f;
  for (int j = 0; j < top_k; ++j) {
    float v = -INFINITE;
    int at = experts;
    for (int e = lane; e < experts; e += 32) better(v, at, choice[e], e);  // NaN, already chosen, is no better
    for (int o = 16; o; o >>= 1)
      better(v, at, __shfl_xor_sync(0xffffffffu, v, o), __shfl_xor_sync(0xffffffffu, at, o));
    sum = __fadd_rn(sum, scores[at]);
    if (lane == 0) {
      y[j] = (float)at;
      choice[at] = __int_as_float(0x7fc00000);
      room[j] = scores[at];
    }
    __syncwarp();
  }
  for (int j = lane; j < top_k; j += 32) {
    const float weight = a.normalise ? __fdiv_rn(room[j], sum) : room[j];
    y[top_k + j] = __fmul_rn(weight, (float)a.scale);
  }
}
