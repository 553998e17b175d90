// Mixtures of experts: what a product knows of the tokens' choices.

struct Choices {
  const float* route;
  i64 route_stride, experts, top_k;
  i64 shared;         // the choices of a token share its row of x
  i64 most;           // pairs of an item
  int* items;         // how many; of each its expert, its first place in `order`, and how many pairs. 0: a pair each
  int* order;         // pairs, expert by expert
  const i64* rows;    // tokens
};

__device__ __forceinline__ int expert_of(const Choices& c, int pair) {
  const float e = c.route[(i64)(pair / (int)c.top_k) * c.route_stride + pair % (int)c.top_k];
  return e >= 0.f && e < (float)c.experts ? (int)e : (int)c.experts;
}

struct Item {
  int expert, first, count;
};

__device__ __forceinline__ int items_of(const Choices& c) { return c.items ? c.items[0] : (int)(*c.rows * c.top_k); }

__device__ __forceinline__ Item item_of(const Choices& c, int i) {
  if (!c.items) return Item{expert_of(c, i), i, 1};
  const int* from = c.items + 1 + 3 * i;
  return Item{from[0], from[1], from[2]};
}

__device__ __forceinline__ int pair_of(const Choices& c, const Item& item, int t) {
  return c.items ? c.order[item.first + t] : item.first;
}

// The row of x that a pair has.
__device__ __forceinline__ i64 row_of(const Choices& c, int pair) { return c.shared ? pair / (int)c.top_k : pair; }
