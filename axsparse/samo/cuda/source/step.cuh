// The whole optimizer step of some tensors: unscale and clip, apply the rule in fp32 to kept
// entries, round, and write dense weights, zeros included. Each thread block writes one TILE.

// The formulas are those of samo/optim/adamw.py and samo/optim/sgd.py, in the order of operations
// and with the roundings that torch has on CPUs with fused multiply-add.
struct AdamW {
    static const int MOMENTS = 2;
    float mean_weight, square_decay, square_weight, decay, root_correction, eps, rate;

    ON_DEVICE void apply(float& master, float gradient, float* moment) const {
        float apart = subtract(gradient, moment[0]);
        moment[0] = mean_weight < 0.5f
                        ? multiply_add(mean_weight, apart, moment[0])
                        : multiply_add(subtract(mean_weight, 1.0f), apart, gradient);
        moment[1] = multiply_add(multiply(square_weight, gradient), gradient,
                                 multiply(moment[1], square_decay));
        float denominator = add(divide(root(moment[1]), root_correction), eps);
        float moved = divide(multiply(rate, moment[0]), denominator);
        master = add(multiply(master, decay), moved);
    }
};

enum Momentum { NONE, PLAIN, NESTEROV };

template <Momentum KIND>
struct Sgd {
    static const int MOMENTS = KIND == NONE ? 0 : 1;
    float weight_decay, momentum, rate;

    ON_DEVICE void apply(float& master, float gradient, float* moment) const {
        float direction =
            weight_decay == 0.0f ? gradient : multiply_add(weight_decay, master, gradient);
        if (KIND != NONE) {
            moment[0] = add(multiply(moment[0], momentum), direction);
            direction =
                KIND == PLAIN ? moment[0] : multiply_add(momentum, moment[0], direction);
        }
        master = multiply_add(rate, direction, master);
    }
};

// One tensor. Masters and moments are those of the kept entries [first, last), which are updated;
// the others keep their weights. `block` is the number of the tensor's first thread block.
struct Tensor {
    void* weight;
    const void* entries;
    const int* offsets;
    Count kept, numel;
    const void* gradient;
    void* master;
    float* moments[2];
    Count first, last, block;
};

// Tensors of one launch, since the launch would cost more than the step of a small tensor.
struct Group {
    Tensor tensors[GROUP];
    Count number;

    ON_DEVICE int of_this_block() const {
        int own = 0;
        while (own + 1 < number && tensors[own + 1].block <= blockIdx.x) ++own;
        return own;
    }
};
static_assert(sizeof(Group) == GROUP_BYTES, "as the host lays it out");

template <typename Bits>
ON_DEVICE void clear_tile(Bits* tile) {
    const int vectors = TILE * sizeof(Bits) / sizeof(uint4);
    for (int i = threadIdx.x; i < vectors; i += THREADS) ((uint4*)tile)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
}

template <typename Bits>
ON_DEVICE void write_tile(Bits* into, const Bits* tile, int count) {
    const int each = sizeof(uint4) / sizeof(Bits);
    int vectors = ((unsigned long long)into) % sizeof(uint4) == 0 ? count / each : 0;
    for (int i = threadIdx.x; i < vectors; i += THREADS) ((uint4*)into)[i] = ((const uint4*)tile)[i];
    for (int i = vectors * each + threadIdx.x; i < count; i += THREADS) into[i] = tile[i];
}

template <typename Index, typename Weight, typename Gradient, typename Rule>
ON_DEVICE void step(const Group& group, float factor, const Rule& rule) {
    typedef typename Weight::Bits WeightBits;
    const Tensor& tensor = group.tensors[group.of_this_block()];
    Count number = blockIdx.x - tensor.block;
    Index index(tensor.entries, tensor.offsets, tensor.kept, tensor.numel);
    Count start = number * TILE;
    Stretch here = index.tile(number);
    if (here.begin == here.end || here.end <= tensor.first || tensor.last <= here.begin) return;

    __shared__ __align__(16) WeightBits tile[TILE];
    clear_tile(tile);

    const typename Gradient::Bits* gradient_K = (const typename Gradient::Bits*)tensor.gradient;
    WeightBits* weight_D = (WeightBits*)tensor.weight;
    float* master_K = (float*)tensor.master;
    Count from = tensor.first > here.begin ? tensor.first : here.begin;
    Count until = least(here.end, tensor.last);
    if (from != here.begin || until != here.end) {
        for (Count k = here.begin + threadIdx.x; k < here.end; k += THREADS) {
            int place = (int)(index.position(k) - start);
            if (k < from || until <= k) tile[place] = weight_D[start + place];
        }
    }
    for (Count own = from + threadIdx.x; own < until; own += LOADS * THREADS) {
        float gradient[LOADS], moment[LOADS][2];
        WeightBits weight[LOADS];
        float stored[LOADS];
        int place[LOADS];  // in the tile
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {  // all reads before the first write
            Count k = own + i * THREADS, at = k - tensor.first;
            if (k >= until) continue;
            place[i] = (int)(index.position(k) - start);
            gradient[i] = Gradient::load(gradient_K[k]);
            if (!Weight::IS_MASTER) stored[i] = master_K[at];
#pragma unroll
            for (int m = 0; m < Rule::MOMENTS; ++m) moment[i][m] = tensor.moments[m][at];
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {  // these wait for their positions
            Count k = own + i * THREADS;
            if (Weight::IS_MASTER && k < until) weight[i] = weight_D[start + place[i]];
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            Count k = own + i * THREADS, at = k - tensor.first;
            if (k >= until) break;
            float master = Weight::IS_MASTER ? Weight::load(weight[i]) : stored[i];
            rule.apply(master, multiply(gradient[i], factor), moment[i]);
            if (!Weight::IS_MASTER) master_K[at] = master;
#pragma unroll
            for (int m = 0; m < Rule::MOMENTS; ++m) tensor.moments[m][at] = moment[i][m];
            tile[place[i]] = Weight::weight(master);
        }
    }
    __syncthreads();
    write_tile(weight_D + start, tile, (int)least(TILE, tensor.numel - start));
}

// Thread blocks that a multiprocessor holds at once, so that enough reads are under way. This
// limits the registers of each thread.
const int RESIDENT = 8;

template <typename Index, typename Weight, typename Gradient>
__global__ __launch_bounds__(THREADS, RESIDENT) void step_adamw(
    const __grid_constant__ Group group, float factor, float mean_weight, float square_decay,
    float square_weight, float decay, float root_correction, float eps, float rate) {
    AdamW rule = {mean_weight, square_decay, square_weight, decay, root_correction, eps, rate};
    step<Index, Weight, Gradient>(group, factor, rule);
}

template <typename Index, typename Weight, typename Gradient, Momentum KIND>
__global__ __launch_bounds__(THREADS, RESIDENT) void step_sgd(
    const __grid_constant__ Group group, float factor, float weight_decay, float momentum,
    float rate, float) {  // KIND says whether the momentum is Nesterov's
    Sgd<KIND> rule = {weight_decay, momentum, rate};
    step<Index, Weight, Gradient>(group, factor, rule);
}
