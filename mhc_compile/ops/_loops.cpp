// The gates of tokens from their projections, and the gradients: what `scale` and `sinkhorn` compute, in their order.
// N, the number of streams, is defined above. A lane is a token, and nothing mixes lanes: a token's bits depend on no
// other token.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

constexpr int K = N * N + 2 * N;
constexpr int LANES = 8;
typedef float V __attribute__((vector_size(4 * LANES)));

struct Form {
    float rms_eps, pre_eps, post_mult, post_eps, eps, start_eps;
    int rms_mode, steps, start, rows_first, clamp;
};

// Those of `Form::start`.
enum { SOFTMAX, EXP, NORMALISED };

// The constants of ops/sinkhorn.py: the unit of matrices without eps, ln 2 in three parts, the largest distance.
constexpr float UNIT = 0x1p-100f, LOG2_UNIT = -100, LARGEST = 1e30f;
constexpr float LN2[] = {0.69140625f, 0.001739501953125f, 1.4286068202862268e-06f};

static inline V all(float x) { return V{} + x; }

static inline V exponential(V x) {
    for (int lane = 0; lane < LANES; lane++) x[lane] = std::exp(x[lane]);
    return x;
}

static inline V whole(V x) {
    for (int lane = 0; lane < LANES; lane++) x[lane] = std::nearbyint(x[lane]);
    return x;
}

static inline V larger(V a, V b) { return a > b ? a : b; }

// 2 to the power of a whole number, exactly; 0 for one below those of normal numbers.
static inline V power_of_2(V exponent) {
    typedef int32_t Bits __attribute__((vector_size(4 * LANES)));
    Bits bits = __builtin_convertvector(larger(exponent + 127.0f, V{}), Bits) << 23;
    V value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// exp(from - top) as m * 2^k with m next to 1 and k whole, as in ops/sinkhorn.py; from <= top.
static inline V exponential(V from, V top, V& k) {
    V x = from - top, moved = x - from, left = (from - (x - moved)) - (top + moved), rest = larger(x, all(-LARGEST));
    left = x == rest ? left : x;  // exp(-inf) is 0
    k = whole(rest * 1.44269504f);
    for (float part : LN2) rest -= k * part;
    // A difference so large that it has no fraction leaves no rest either, but rounding errors above 1.
    return exponential(larger(rest < 1.0f ? rest : all(1), all(-1)) + left);
}

static inline V root(V x) {
    for (int lane = 0; lane < LANES; lane++) x[lane] = std::sqrt(x[lane]);
    return x;
}

static inline V sigmoid(V x) { return 1.0f / (exponential(-x) + 1.0f); }

// The parts pre, post and res, if a scale is for a whole part.
static inline int group(int j) { return (j >= N) + (j >= 2 * N); }

// Tokens [first, first + LANES) of [tokens, width], a vector for each column; past the end the last token again.
// The first `width` numbers of each token, whose numbers lie `stride` apart.
static void load(V* to, const float* from, int width, long first, long tokens, long stride) {
    for (int lane = 0; lane < LANES; lane++) {
        const float* row = from + stride * (first + lane < tokens ? first + lane : tokens - 1);
        for (int j = 0; j < width; j++) to[j][lane] = row[j];
    }
}

static void load(V* to, const float* from, int width, long first, long tokens) {
    load(to, from, width, first, tokens, width);
}

static void store(float* to, const V* from, int width, long first, long tokens, long stride) {
    for (int lane = 0; lane < LANES && first + lane < tokens; lane++)
        for (int j = 0; j < width; j++) to[stride * (first + lane) + j] = from[j][lane];
}

static void store(float* to, const V* from, int width, long first, long tokens) {
    store(to, from, width, first, tokens, width);
}

struct Matrix {
    V at[N * N];
    // Element b of row a, or of column a.
    template <bool rows> V& get(int a, int b) { return at[rows ? a * N + b : b * N + a]; }
    // By halves; why: ops/sinkhorn.py.
    template <bool rows> V sum(int a) {
        V parts[N];
        for (int b = 0; b < N; b++) parts[b] = get<rows>(a, b);
        for (int many = N; many > 1; many -= many / 2)
            for (int b = 0; b < many / 2; b++) parts[b] += parts[many - many / 2 + b];
        return parts[0];
    }
    template <bool rows> V largest(int a) {
        V found = get<rows>(a, 0);
        for (int b = 1; b < N; b++) found = larger(get<rows>(a, b), found);
        return found;
    }
};

template <bool rows> static V weighted_sum(Matrix& d, Matrix& p, int a) {
    V total = {};
    for (int b = 0; b < N; b++) total += d.get<rows>(a, b) * p.get<rows>(a, b);
    return total;
}

// d - sizes * sum(d * p) along an axis along which sizes * p was normalised without eps, or sizes are 0; why with two
// sums: ops/sinkhorn.py.
template <bool rows> static void centre(Matrix& d, Matrix& p, const V* sizes, int a) {
    V through = weighted_sum<rows>(d, p, a), again = {}, lost[N];
    for (int b = 0; b < N; b++) {
        V &own = d.get<rows>(a, b), whole = own, first = sizes[b] * through;
        own -= first;
        lost[b] = (whole - own) - first;
        again += own * p.get<rows>(a, b) + lost[b] * p.get<rows>(a, b);
    }
    for (int b = 0; b < N; b++) d.get<rows>(a, b) += lost[b] - sizes[b] * again;
}

// The start "normalised" of ops/sinkhorn.py, normalised along an axis; sizes are the factors of the other axis's lines.
template <bool rows> static void normalised(Matrix& p, V* sizes, bool further) {
    Matrix k, entries;
    for (int a = 0; a < N; a++) {
        V largest = p.largest<rows>(a);
        for (int b = 0; b < N; b++) {
            p.get<rows>(a, b) = exponential(p.get<rows>(a, b), largest, k.get<rows>(a, b));
            entries.get<rows>(a, b) = p.get<rows>(a, b) * power_of_2(k.get<rows>(a, b));
        }
        V total = entries.sum<rows>(a);
        for (int b = 0; b < N; b++) p.get<rows>(a, b) /= total;
    }
    for (int b = 0; b < N; b++) {
        V top = further ? k.largest<!rows>(b) : V{};
        for (int a = 0; a < N; a++) p.get<rows>(a, b) *= power_of_2(k.get<rows>(a, b) - top - LOG2_UNIT);
        sizes[b] = power_of_2(top);
    }
}

template <bool rows> static void normalised_gradient(Matrix& d, Matrix& p, const V* sizes) {
    for (V& element : p.at) element *= UNIT;
    for (int a = 0; a < N; a++) {
        centre<rows>(d, p, sizes, a);
        for (int b = 0; b < N; b++) d.get<rows>(a, b) *= p.get<rows>(a, b);
    }
}

template <bool rows> static void start(Matrix& p, bool softmax) {
    for (int a = 0; a < N; a++) {
        V largest = p.largest<rows>(a);
        for (int b = 0; b < N; b++) p.get<rows>(a, b) = exponential(p.get<rows>(a, b) - largest);
        V total = softmax ? p.sum<rows>(a) : all(1);
        for (int b = 0; b < N; b++) p.get<rows>(a, b) /= total;
    }
}

template <bool rows> static void start_gradient(Matrix& d, Matrix& p, Matrix& logits, bool softmax) {
    for (int a = 0; a < N; a++) {
        V total = {}, largest = logits.largest<rows>(a), ties = {};
        for (int b = 0; b < N; b++) {
            total += d.get<rows>(a, b) * p.get<rows>(a, b);
            ties += logits.get<rows>(a, b) == largest ? all(1) : all(0);
        }
        for (int b = 0; b < N; b++) {
            V &own = d.get<rows>(a, b), through = logits.get<rows>(a, b) == largest ? total / ties : all(0);
            own = softmax ? p.get<rows>(a, b) * (own - total) : p.get<rows>(a, b) * own - through;
        }
    }
}

template <bool rows> static void half_step(Matrix& p, V* totals, const Form& form) {
    for (int a = 0; a < N; a++) {
        V total = p.sum<rows>(a);
        if (form.start == NORMALISED) totals[a] = total * UNIT;
        else totals[a] = !form.clamp ? total + form.eps : total < form.eps ? all(form.eps) : total;
        for (int b = 0; b < N; b++) p.get<rows>(a, b) /= totals[a];
    }
}

template <bool rows> static void half_step_gradient(Matrix& d, Matrix& p, const V* totals, const Form& form) {
    for (int a = 0; a < N; a++) {
        if (form.start == NORMALISED)
            for (int b = 0; b < N; b++) p.get<rows>(a, b) *= UNIT;
        if (form.start == NORMALISED || form.clamp) {
            V sizes[N];
            for (V& size : sizes) size = totals[a] > (form.clamp ? form.eps : 0.0f) ? all(1) : all(0);
            centre<rows>(d, p, sizes, a);
        } else {
            V through = weighted_sum<rows>(d, p, a);
            for (int b = 0; b < N; b++) d.get<rows>(a, b) -= through;
        }
        for (int b = 0; b < N; b++) {
            V& own = d.get<rows>(a, b);
            own /= totals[a];
            // The gradient of an entry that has underflowed may overflow. Bounded, it counts as 0 and not as 0 * inf.
            if (form.start != NORMALISED) own = own > FLT_MAX ? all(FLT_MAX) : own < -FLT_MAX ? all(-FLT_MAX) : own;
        }
    }
}

// P before the first half step without start_eps, of these logits; sizes are those of `normalised`.
static Matrix begin(const Form& form, Matrix p, V* sizes) {
    if (form.start == NORMALISED) form.rows_first ? normalised<false>(p, sizes, form.steps)
                                                  : normalised<true>(p, sizes, form.steps);
    else if (form.start == SOFTMAX || form.rows_first) start<true>(p, form.start == SOFTMAX);
    else start<false>(p, false);
    return p;
}

static inline bool over_rows(int step, const Form& form) { return (step % 2 == 0) == bool(form.rows_first); }

static Matrix iterated(const Form& form, const Matrix& logits) {
    V totals[N], sizes[N];
    Matrix p = begin(form, logits, sizes);
    for (V& element : p.at) element += form.start_eps;
    for (int s = 0; s < form.steps; s++)
        over_rows(s, form) ? half_step<true>(p, totals, form) : half_step<false>(p, totals, form);
    if (form.start == NORMALISED)
        for (V& element : p.at) element *= UNIT;
    return p;
}

// Room for what `iterated` makes on the way.
struct History {
    std::vector<Matrix> after;
    std::vector<V> totals;

    explicit History(long steps) : after(steps), totals(N * steps) {}

    // The gradient of logits; d is that of what is made of them.
    Matrix gradient(const Form& form, const Matrix& logits, Matrix d) {
        V sizes[N];
        Matrix begun = begin(form, logits, sizes);
        after[0] = begun;
        for (V& element : after[0].at) element += form.start_eps;
        for (int s = 0; s < form.steps; s++) {
            Matrix& p = after[s + 1] = after[s];
            V* sums = &totals[N * s];
            over_rows(s, form) ? half_step<true>(p, sums, form) : half_step<false>(p, sums, form);
        }
        for (int s = form.steps; s-- > 0;) {
            Matrix& p = after[s + 1];
            const V* sums = &totals[N * s];
            over_rows(s, form) ? half_step_gradient<true>(d, p, sums, form)
                               : half_step_gradient<false>(d, p, sums, form);
        }
        Matrix of_start = logits;
        if (form.start == NORMALISED) form.rows_first ? normalised_gradient<false>(d, begun, sizes)
                                                      : normalised_gradient<true>(d, begun, sizes);
        else if (form.start == SOFTMAX || form.rows_first)
            start_gradient<true>(d, begun, of_start, form.start == SOFTMAX);
        else start_gradient<false>(d, begun, of_start, false);
        return d;
    }
};

// What both directions begin with.
struct Tile {
    V ms, root_ms, r, h[K], normed[K], weight[K], logits[K];

    Tile(const Form& form, const float* all_h, const float* all_ms, const float* scale, const float* bias, long k,
         long rows, bool grouped, long first, long tokens) {
        load(h, all_h, k, first, tokens, rows);
        load(&ms, all_ms, 1, first, tokens);
        root_ms = root(ms);
        if (form.rms_mode == 0) r = root(ms + form.rms_eps);
        else if (form.rms_mode == 1) r = root_ms + form.rms_eps;
        else if (form.rms_mode == 2) r = root_ms < form.rms_eps ? all(form.rms_eps) : root_ms;
        else r = all(1.0f);
        r = 1.0f / r;
        for (int j = 0; j < k; j++) {
            weight[j] = all(scale[grouped ? group(j) : j]);
            normed[j] = h[j] * r;
            logits[j] = bias[j] + normed[j] * weight[j];
        }
    }

    Matrix residual() const {
        Matrix result;
        for (int j = 0; j < N * N; j++) result.at[j] = logits[2 * N + j];
        return result;
    }
};

// Not inlined, as the next: further below there are other rules for rounding.
[[gnu::noinline]] static void forward(const Form& form, const float* h, const float* ms, const float* scale,
                                      const float* bias, float* pre, float* post, float* res, long k, long rows,
                                      long grouped, long tokens, long threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long first = 0; first < tokens; first += LANES) {
        const Tile tile(form, h, ms, scale, bias, k, rows, grouped, first, tokens);
        V gates[N];
        for (int i = 0; i < N; i++) gates[i] = sigmoid(tile.logits[i]) + form.pre_eps;
        store(pre, gates, N, first, tokens);
        if (k == N) continue;
        for (int i = 0; i < N; i++) gates[i] = form.post_mult * sigmoid(tile.logits[N + i]) + form.post_eps;
        store(post, gates, N, first, tokens);
        if (k == 2 * N) continue;
        store(res, iterated(form, tile.residual()).at, N * N, first, tokens);
    }
}

// The entries of scale, by parts or by rows.
static long scales(long k, long grouped) { return grouped ? group(k - 1) + 1 : k; }

// d_pre, d_post and d_res may be null. d_scale and d_bias hold the share of every token in these gradients.
[[gnu::noinline]] static void backward(const Form& form, const float* h, const float* ms, const float* scale,
                                       const float* bias, const float* d_pre, const float* d_post, const float* d_res,
                                       float* pre, float* d_h, float* d_ms, float* d_scale, float* d_bias, long k,
                                       long rows, long grouped, long tokens, long threads) {
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        bool iterates = k > 2 * N && d_res;
        History history(iterates ? form.steps + 1 : 0);
        #pragma omp for
        for (long first = 0; first < tokens; first += LANES) {
            const Tile tile(form, h, ms, scale, bias, k, rows, grouped, first, tokens);
            V gates[2 * N], d_logits[K] = {};
            // sigmoid(l) * sigmoid(-l) keeps its relative accuracy where s * (1 - s) cancels.
            const float* given_gates[] = {d_pre, d_post};
            for (int part = 0; part < 2 && part * N < k; part++) {
                V* d = d_logits + part * N;
                if (given_gates[part]) load(d, given_gates[part], N, first, tokens);
                for (int i = 0; i < N; i++) {
                    V logit = tile.logits[part * N + i], gate = sigmoid(logit);
                    if (part == 0) gates[i] = gate + form.pre_eps;
                    if (given_gates[part]) d[i] = gate * sigmoid(-logit) * d[i] * (part ? form.post_mult : 1.0f);
                }
            }
            store(pre, gates, N, first, tokens);
            if (iterates) {
                Matrix d;
                load(d.at, d_res, N * N, first, tokens);
                d = history.gradient(form, tile.residual(), d);
                for (int j = 0; j < N * N; j++) d_logits[2 * N + j] = d.at[j];
            }
            store(d_bias, d_logits, k, first, tokens);
            V shares[K] = {}, d_projection[K], r_dr = {};
            for (int j = 0; j < k; j++) {
                shares[grouped ? group(j) : j] += d_logits[j] * tile.normed[j];
                V d_normed = d_logits[j] * tile.weight[j];
                r_dr += d_normed * tile.normed[j];
                d_projection[j] = d_normed * tile.r;
            }
            store(d_scale, shares, scales(k, grouped), first, tokens);
            store(d_h, d_projection, k, first, tokens, rows);
            // dr is of the size of the token and more, so that it would overflow where squares do; r * dr is of none.
            V d = -0.5f * (r_dr * tile.r * tile.r);
            if (form.rms_mode == 3) d = all(0);
            else if (form.rms_mode != 0) {
                V least = all(form.rms_mode == 2 ? form.rms_eps : 0.0f);
                d = (tile.root_ms > all(0)) & (tile.root_ms >= least) ? -0.5f * (r_dr * tile.r / tile.root_ms) : all(0);
            }
            store(d_ms, &d, 1, first, tokens);
        }
    }
}

// Matrices [tokens, N, N] of logits that come from elsewhere.
extern "C" [[gnu::noinline]] void sinkhorn(const Form* form, const float* logits, float* res, long, long tokens,
                                           long threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long first = 0; first < tokens; first += LANES) {
        Matrix given;
        load(given.at, logits, N * N, first, tokens);
        store(res, iterated(*form, given).at, N * N, first, tokens);
    }
}

extern "C" [[gnu::noinline]] void sinkhorn_backward(const Form* form, const float* d_res, const float* logits,
                                                    float* d_logits, long, long tokens, long threads) {
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        History history(form->steps + 1);
        #pragma omp for
        for (long first = 0; first < tokens; first += LANES) {
            Matrix given, d;
            load(given.at, logits, N * N, first, tokens);
            load(d.at, d_res, N * N, first, tokens);
            store(d_logits, history.gradient(*form, given, d).at, N * N, first, tokens);
        }
    }
}

// The sum of [tokens, columns] over its tokens, which no float would carry so far.
static void total(float* to, const std::vector<float>& shares, long columns, long tokens) {
    std::vector<double> sums(columns);
    for (long m = 0; m < tokens; m++)
        for (long j = 0; j < columns; j++) sums[j] += shares[columns * m + j];
    for (long j = 0; j < columns; j++) to[j] = sums[j];
}

// From here on sums of products alone, each product rounded together with its sum.
#ifdef __clang__
#pragma STDC FP_CONTRACT ON
#else
#pragma GCC optimize("fp-contract=fast")
#endif

// The upper half of a float.
struct BFloat16 {
    uint16_t bits;
};

static inline V load(const float* at) {
    V value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

static inline V load(const BFloat16* at) {
    typedef uint16_t Short __attribute__((vector_size(2 * LANES)));
    typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
    Short upper;
    std::memcpy(&upper, at, sizeof upper);
    Bits bits = __builtin_convertvector(upper, Bits) << 16;
    V value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float number(float x) { return x; }

static inline float number(BFloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Columns whose sum is one term of a longer sum, so that errors grow with neither.
constexpr long BLOCK = 64 * LANES;

template <typename A, typename B> static float product(const A* a, const B* b, long width) {
    float total = 0;
    for (long begin = 0; begin < width; begin += BLOCK) {
        long c = begin, end = begin + BLOCK < width ? begin + BLOCK : width;
        V parts[4] = {};
        for (; c + 4 * LANES <= end; c += 4 * LANES)
            #pragma GCC unroll 4
            for (int part = 0; part < 4; part++) parts[part] += load(a + c + part * LANES) * load(b + c + part * LANES);
        V sums = (parts[0] + parts[1]) + (parts[2] + parts[3]);
        float sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
        for (; c < end; c++) sum += number(a[c]) * number(b[c]);
        total += sum;
    }
    return total;
}

// Asks for one of `parts` equal parts of numbers that will be read soon.
template <typename X> static inline void prefetch(const X* at, long numbers, long part, long parts) {
    constexpr long LINE = 64 / sizeof(X);
    for (long c = numbers * part / parts / LINE * LINE; c < numbers * (part + 1) / parts; c += LINE)
        __builtin_prefetch(at + c);
}

template <typename A, typename B>
static void products_of(const A* a, const B* b, float* out, long rows, long others, long width, long tokens,
                        long threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long m = 0; m < tokens; m++)
        for (long i = 0; i < rows; i++)
            for (long o = 0; o < others; o++) {
                // A row is often a page, which processors do not look beyond.
                if (m + 1 < tokens) {
                    prefetch(a + (m + 1) * rows * width, rows * width, i * others + o, rows * others);
                    prefetch(b + (m + 1) * others * width, others * width, i * others + o, rows * others);
                }
                out[(m * rows + i) * others + o] =
                    product(a + (m * rows + i) * width, b + (m * others + o) * width, width);
            }
}

// out[m, i, o] = <a[m, i], b[m, o]> of [tokens, rows, width] and [tokens, others, width]; whether a and b are bfloat16.
extern "C" void products(long rows, long others, long bf16_a, long bf16_b, const void* a, const void* b, float* out,
                         long width, long tokens, long threads) {
    auto run = [&](auto* of_a, auto* of_b) { products_of(of_a, of_b, out, rows, others, width, tokens, threads); };
    if (bf16_a) bf16_b ? run((const BFloat16*)a, (const BFloat16*)b) : run((const BFloat16*)a, (const float*)b);
    else bf16_b ? run((const float*)a, (const BFloat16*)b) : run((const float*)a, (const float*)b);
}

// The pairs one by one: in a loop over them, compilers keep the sums in memory.
template <int... t, int... r, int... pair>
static inline void multiply(V* sums, float const* const* token, float const* const* row, long end,
                            std::integer_sequence<int, t...>, std::integer_sequence<int, r...>,
                            std::integer_sequence<int, pair...>) {
    for (long c = 0; c < end; c += LANES) {
        V left[] = {load(token[t] + c)...}, right[] = {load(row[r] + c)...};
        ((sums[pair] += left[pair / sizeof...(r)] * right[pair % sizeof...(r)]), ...);
    }
}

// A block of columns as floats: where it is, or in `room`.
static inline const float* widened(const float* block, float*, long) { return block; }

static inline const float* widened(const BFloat16* block, float* room, long columns) {
    long c = 0;
    for (; c + LANES <= columns; c += LANES) {
        V value = load(block + c);
        std::memcpy(room + c, &value, sizeof value);
    }
    for (; c < columns; c++) room[c] = number(block[c]);
    return room;
}

// Tokens [first, first + T), R rows at once, to load less than is multiplied. The order of a sum is the same wherever in a
// tile it lies. h [tokens, stride] gets `rows` <= K columns; ms may be null.
template <int T, int R, typename X>
static void project_tile(const X* x, const float* phi, float* h, float* ms, long rows, long stride, long width, long first,
                         long tokens) {
    float room[T][BLOCK], squares[T] = {};
    const float* token[T];
    const float* row[R];
    V total[K + R][T] = {};
    float rest[K][T] = {};
    for (long begin = 0; begin < width; begin += BLOCK) {
        long columns = begin + BLOCK < width ? BLOCK : width - begin, whole = columns - columns % LANES;
        for (int t = 0; t < T; t++) {
            // Past the end the last one again, and so for rows.
            long m = first + t < tokens ? first + t : tokens - 1;
            token[t] = widened(x + width * m + begin, room[t], columns);
            if (ms) squares[t] += product(token[t], token[t], columns);
        }
        for (long k = 0; k < rows; k += R) {
            for (long m = first + T; m < first + 2 * T && m < tokens; m++)
                prefetch(x + width * m + begin, columns, k / R, (rows - 1) / R + 1);
            for (int r = 0; r < R; r++) row[r] = phi + width * (k + r < rows ? k + r : rows - 1) + begin;
            V sums[T * R] = {};
            multiply(sums, token, row, whole, std::make_integer_sequence<int, T>(),
                     std::make_integer_sequence<int, R>(), std::make_integer_sequence<int, T * R>());
            for (int pair = 0; pair < T * R; pair++) total[k + pair % R][pair / R] += sums[pair];
        }
        for (long k = 0; k < rows && whole < columns; k++)
            for (int t = 0; t < T; t++)
                for (long c = whole; c < columns; c++) rest[k][t] += token[t][c] * phi[width * k + begin + c];
    }
    for (int t = 0; t < T && first + t < tokens; t++) {
        for (long k = 0; k < rows; k++) {
            float sum = 0;
            for (int lane = 0; lane < LANES; lane++) sum += total[k][t][lane];
            h[stride * (first + t) + k] = sum + rest[k][t];
        }
        if (ms) ms[first + t] = squares[t] / width;
    }
}

template <int T, int R, typename X>
static void project_of(const X* x, const float* phi, float* h, float* ms, long rows, long width, long tokens,
                       long threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long first = 0; first < tokens; first += T)
        for (long k = 0; k < rows; k += K)
            project_tile<T, R>(x, phi + width * k, h + k, k ? nullptr : ms, k + K < rows ? K : rows - k, rows, width,
                               first, tokens);
}

// h[m, k] = <x[m], phi[k]> and ms[m] = mean(x[m]^2) of x [tokens, N, width] and phi [rows, N * width]; whether x is
// bfloat16.
extern "C" void project(long rows, long bf16_x, const void* x, const float* phi, float* h, float* ms, long width,
                        long tokens, long threads) {
    auto run = [&](auto* of_x) {
        if (tokens == 1) project_of<1, 12>(of_x, phi, h, ms, rows, N * width, tokens, threads);
        else project_of<4, 3>(of_x, phi, h, ms, rows, N * width, tokens, threads);
    };
    bf16_x ? run((const BFloat16*)x) : run((const float*)x);
}

// Vectors of columns, for sums in which no column meets another: their width changes no bit.
#ifdef __AVX512F__
constexpr int WIDE = 16;
constexpr long TOKENS = 6;
#else
constexpr int WIDE = 8;
constexpr long TOKENS = 3;
#endif
typedef float W __attribute__((vector_size(4 * WIDE)));
// Columns at once; the tokens that go together through memory, at most; and how much of phi is copied to one place for
// them, panel by panel: its rows are often a power of two apart, and would push each other out of the cache.
constexpr int VECTORS = 32 / WIDE;
constexpr long STEP = VECTORS * WIDE, GROUP = 96, COPIED = 36864;

static inline W load_wide(const float* at) {
    W value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

static inline void store_wide(float* at, W value) { std::memcpy(at, &value, sizeof value); }

template <int... vector, int... pair>
static inline void spread(W* sums, const float* left, const float* row, std::integer_sequence<int, vector...>,
                          std::integer_sequence<int, pair...>) {
    W right[] = {load_wide(row + vector * WIDE)...};
    ((sums[pair] += left[pair / VECTORS] * right[pair % VECTORS]), ...);
}

// Columns of floats as bfloat16, rounded to the nearest, ties to even, and any NaN as one. Reads whole vectors.
static inline void rounded(const float* from, BFloat16* to, long columns) {
    typedef uint32_t Bits __attribute__((vector_size(4 * WIDE)));
    typedef uint16_t Short __attribute__((vector_size(2 * WIDE)));
    for (long c = 0; c < columns; c += WIDE) {
        W value = load_wide(from + c);
        Bits bits;
        std::memcpy(&bits, &value, sizeof bits);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        Short upper = __builtin_convertvector(value == value ? bits : Bits{} + 0x7fff, Short);
        std::memcpy(to + c, &upper, std::min<long>(WIDE, columns - c) * sizeof(BFloat16));
    }
}

static inline void take(const float* at, float& value) { value = *at; }
static inline void take(const float* at, W& value) { value = load_wide(at); }
static inline void take(const BFloat16* at, float& value) { value = number(*at); }

static inline void take(const BFloat16* at, W& value) {
    typedef uint16_t Short __attribute__((vector_size(2 * WIDE)));
    typedef uint32_t Bits __attribute__((vector_size(4 * WIDE)));
    Short upper;
    std::memcpy(&upper, at, sizeof upper);
    Bits bits = __builtin_convertvector(upper, Bits) << 16;
    std::memcpy(&value, &bits, sizeof value);
}

// Streams, or another tensor with columns, as floats or as bfloat16; may be null.
struct Rows {
    const void* at;
    bool narrow;

    // floats: of tensors of which none is narrow.
    template <typename Value, bool floats> [[gnu::always_inline]] Value load(long from) const {
        Value value;
        narrow && !floats ? take((const BFloat16*)at + from, value) : take((const float*)at + from, value);
        return value;
    }

    // STEP columns that will be read soon.
    void ask(long from) const {
        if (!at) return;
        narrow ? prefetch((const BFloat16*)at + from, STEP, 0, 1) : prefetch((const float*)at + from, STEP, 0, 1);
    }
};

// A projection's part in the gradient: d_h @ phi + 2 / width * d_ms * x; rows of phi.
struct Projected {
    const float *d_h, *phi, *d_ms;
    long rows;
};

// Adds left[k, t] * panel[k, c], summed over k, to what the tokens of a tile have in `sums`, so far apart. The sum over
// k is often far smaller than that: it is made by itself, so that its roundings are as small.
template <int T>
static inline void add_products(float* sums, long apart, const float* left, const float* panel, long rows) {
    W totals[T * VECTORS] = {};
    for (long k = 0; k < rows; k++)
        spread(totals, left + T * k, panel + STEP * k, std::make_integer_sequence<int, VECTORS>(),
               std::make_integer_sequence<int, T * VECTORS>());
    #pragma GCC unroll 16
    for (int pair = 0; pair < T * VECTORS; pair++) {
        float* to = sums + apart * (pair / VECTORS) + pair % VECTORS * WIDE;
        store_wide(to, load_wide(to) + totals[pair]);
    }
}

// What a gradient of streams is made of.
struct StreamGradient {
    Projected projections[2];
    Rows x, d_out, d_new, d_x;
    const float *h_pre, *h_res;
    void* out;
    bool rounds;
    long columns;

    long rows() const { return projections[0].rows + projections[1].rows; }

    // The other terms of token m, for columns that begin at c.
    template <typename Value, bool floats>
    [[gnu::always_inline]] void add_terms(float* to, long stride, long m, float ms, long c) const {
        Value given[N], out = {};
        if (h_pre) out = d_out.load<Value, floats>(m * columns + c);
        if (h_res)
            #pragma GCC unroll 8
            for (int o = 0; o < N; o++) given[o] = d_new.load<Value, floats>((m * N + o) * columns + c);
        #pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            const long own = (m * N + i) * columns + c;
            Value sum = {};
            if (d_x.at) sum = d_x.load<Value, floats>(own);
            if (x.at) sum += ms * x.load<Value, floats>(own);
            if (h_pre) sum += h_pre[m * N + i] * out;
            if (h_res)
                #pragma GCC unroll 8
                for (int o = 0; o < N; o++) sum += h_res[(m * N + i) * N + o] * given[o];
            std::memcpy(to + stride * i, &sum, sizeof sum);
        }
    }

    // All other terms of token m.
    template <bool floats> void begin(float* to, long most, long m, float ms, long block, long size) const {
        const StreamGradient own = *this;  // which no store may change
        long c = 0;
        for (; c + WIDE <= size; c += WIDE) own.add_terms<W, floats>(to + c, most, m, ms, block + c);
        for (; c < size; c++) own.add_terms<float, floats>(to + c, most, m, ms, block + c);
    }

    // Tokens [first, first + T), columns [block, block + size) of each stream; copied: those of phi.
    template <int T>
    void tile(long first, long last, long block, long size, long most, const float* copied, float* room) const {
        float *sums = room, *left = sums + T * N * most;
        for (int t = 0; t < T; t++) {
            const long m = first + t;
            float *weight = left + t, *to = sums + N * most * t, ms = 0;
            for (const Projected& given : projections) {
                for (long k = 0; k < given.rows; k++, weight += T) *weight = given.d_h[given.rows * m + k];
                if (given.d_ms) ms += given.d_ms[m] * (2.0f / (N * columns));
            }
            x.narrow || d_out.narrow || d_new.narrow || d_x.narrow ? begin<false>(to, most, m, ms, block, size)
                                                                   : begin<true>(to, most, m, ms, block, size);
        }
        for (int i = 0; i < N; i++)
            for (long c = 0; c < size; c += STEP, copied += STEP * rows()) {
                // What the next tile adds.
                for (long m = first + T; m < first + 2 * T && m < last; m++)
                    for (const Rows& tensor : {x, d_new, d_x}) tensor.ask((m * N + i) * columns + block + c);
                add_products<T>(sums + most * i + c, N * most, left, copied, rows());
            }
        for (int t = 0; t < T; t++)
            for (int i = 0; i < N; i++) {
                const float* sum = sums + most * (N * t + i);
                const long at = ((first + t) * N + i) * columns + block;
                if (rounds) rounded(sum, (BFloat16*)out + at, size);
                else std::copy_n(sum, size, (float*)out + at);
            }
    }

    // Columns [block, block + size) of each stream, STEP by STEP, zeros after them.
    void copy(float* to, long block, long size) const {
        for (int i = 0; i < N; i++)
            for (long c = 0; c < size; c += STEP)
                for (const Projected& given : projections)
                    for (long k = 0; k < given.rows; k++, to += STEP) {
                        const float* from = given.phi + N * columns * k + i * columns + block + c;
                        if (c + STEP <= size) std::memcpy(to, from, STEP * sizeof(float));
                        else std::fill(std::copy_n(from, size - c, to), to + STEP, 0.0f);
                    }
    }

    void run(long tokens, long threads) const {
        // Blocks of equal sizes, as far as there are whole steps.
        const long steps = (columns - 1) / STEP + 1;
        const long blocks = std::min(steps, (steps * STEP * N * rows() - 1) / COPIED + 1);
        const long most = ((steps - 1) / blocks + 1) * STEP, share = (tokens - 1) / threads + 1;
        const long group = std::min(GROUP, ((share - 1) / TOKENS + 1) * TOKENS);
        #pragma omp parallel for num_threads(threads) if (threads > 1)
        for (long start = 0; start < tokens; start += group) {
            // Kept: to free so much may have malloc give pages back that the next tensor needs.
            static thread_local std::vector<float> copied, room;
            copied.resize(std::max<size_t>(copied.size(), N * rows() * most));
            room.resize(std::max<size_t>(room.size(), TOKENS * (N * most + rows())));
            const long end = std::min(tokens, start + group);
            for (long block = 0; block < columns; block += most) {
                const long size = std::min(most, columns - block);
                copy(copied.data(), block, size);
                long m = start;
                for (; m + TOKENS <= end; m += TOKENS)
                    tile<TOKENS>(m, end, block, size, most, copied.data(), room.data());
                for (; m < end; m++) tile<1>(m, end, block, size, most, copied.data(), room.data());
            }
        }
    }
};

// The gradient of streams x [tokens, N, columns], in this order of its terms:
// d_x + 2 / (N * columns) * d_ms * x + h_pre * d_out + the sum of h_res[o] * d_new[o] + (that of d_h[k] * phi[k]).
// All but those of the first projection may be null. Bits of `narrow`: which of x, d_out, d_new, d_x, out are bfloat16.
extern "C" void unproject(long rows, long more_rows, long narrow, const float* d_h, const float* phi, const float* d_ms,
                          const float* more_h, const float* more_phi, const float* more_ms, const void* x,
                          const float* h_pre, const void* d_out, const float* h_res, const void* d_new, const void* d_x,
                          void* out, long columns, long tokens, long threads) {
    auto given = [&](const void* at, int bit) { return Rows{at, bool(narrow >> bit & 1)}; };
    StreamGradient{{{d_h, phi, d_ms, rows}, {more_h, more_phi, more_ms, more_rows}},
                   given(x, 0), given(d_out, 1), given(d_new, 2), given(d_x, 3), h_pre, h_res, out,
                   bool(narrow >> 4 & 1), columns}.run(tokens, threads);
}

// The projection of x [tokens, N, width] and, with a form, the gates of the first k of its rows.
extern "C" void mix(const Form* form, long k, long rows, long grouped, long bf16_x, const void* x, const float* phi,
                    const float* scale, const float* bias, float* h, float* ms, float* pre, float* post, float* res,
                    long width, long tokens, long threads) {
    project(rows, bf16_x, x, phi, h, ms, width, tokens, threads);
    if (form) forward(*form, h, ms, scale, bias, pre, post, res, k, rows, grouped, tokens, threads);
}

// pre, and the gradients of h, ms, scale and bias by those of the gates, to which more_h and more_ms are
// added. d_out [tokens, width] stands for d_pre.
extern "C" void mix_backward(const Form* form, long k, long rows, long grouped, long bf16_x, long bf16_out,
                             const void* x, const void* d_out, const float* h, const float* ms, const float* scale,
                             const float* bias, const float* d_pre, const float* d_post, const float* d_res,
                             const float* more_h, const float* more_ms, float* pre, float* d_h, float* d_ms,
                             float* d_scale, float* d_bias, long width, long tokens, long threads) {
    std::vector<float> of_pre(d_out ? tokens * N : 0), of_bias(tokens * k), of_scale(tokens * scales(k, grouped));
    if (d_out) {
        products(N, 1, bf16_x, bf16_out, x, d_out, of_pre.data(), width, tokens, threads);
        d_pre = of_pre.data();
    }
    std::fill(d_h, d_h + tokens * rows, 0.0f);
    backward(*form, h, ms, scale, bias, d_pre, d_post, d_res, pre, d_h, d_ms, of_scale.data(), of_bias.data(), k,
             rows, grouped, tokens, threads);
    total(d_scale, of_scale, scales(k, grouped), tokens);
    total(d_bias, of_bias, k, tokens);
    for (long i = 0; more_h && i < tokens * rows; i++) d_h[i] += more_h[i];
    for (long m = 0; more_ms && m < tokens; m++) d_ms[m] += more_ms[m];
}
