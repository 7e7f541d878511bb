// From dense gradients to kept ones, and the sums of their squares, which are finite if and only if
// they are, since squares of fp32 are exact in fp64 and cannot overflow it. A thread block takes
// CHUNK kept entries and adds in one order: the entries of a thread ascending, threads by halves of
// a warp, then warps and chunks in order.

const int LOADS = 4;  // reads that a thread has under way at once

// Joins the values of all threads in one order; thread 0 gets the result.
template <typename Value, typename Join>
ON_DEVICE Value over_threads(Value own, Join join) {
    __shared__ Value of_warps[THREADS / 32];
    for (int distance = 16; distance > 0; distance /= 2) {
        own = join(own, from_lane_behind(own, distance));
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x != 0) return own;
    for (int warp = 1; warp < THREADS / 32; ++warp) own = join(own, of_warps[warp]);
    return own;
}

ON_DEVICE double square(float value) {
    double wide = widen(value);
    return wide * wide;
}

// gradient (+)= dense at the kept positions.
template <typename Index, typename Dense, typename Gradient>
__global__ void compress(const void* dense, const void* entries, const int* offsets, Count kept,
                         Count numel, void* gradient, int accumulate) {
    const typename Dense::Bits* __restrict__ from_D = (const typename Dense::Bits*)dense;
    typename Gradient::Bits* __restrict__ into_K = (typename Gradient::Bits*)gradient;
    Index index(entries, offsets, kept, numel);
    Count first = (Count)blockIdx.x * CHUNK, last = least(first + CHUNK, kept);
    index.seek(first);
    for (Count from = first; from < last;) {
        Count until = index.advance(from, last);
        // An entry's place in its chunk decides its thread, wherever the stretch begins.
        Count own = from + ((threadIdx.x - (unsigned)(from - first)) & (THREADS - 1));
        for (; own < until; own += LOADS * THREADS) {
            Count at[LOADS];
            float fresh[LOADS], before[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                Count k = own + i * THREADS;
                at[i] = k < until ? index.position(k) : 0;
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                Count k = own + i * THREADS;
                fresh[i] = k < until ? Dense::load(from_D[at[i]]) : 0.0f;
                before[i] = k < until && accumulate ? Gradient::load(into_K[k]) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                Count k = own + i * THREADS;
                if (k >= until) break;
                float sum = accumulate ? add(before[i], fresh[i]) : fresh[i];
                into_K[k] = Gradient::nearest(sum);
            }
        }
        from = until;
    }
}

// One tensor's gradient. `chunk` is the number of its first chunk among those of all tensors of the
// launch, `first` that of its first partial sum.
struct NormInput {
    const void* gradient;
    double* partials;
    Count kept, chunk, first;
};

// Tensors of one launch, since most of them are so small that a launch would cost more.
struct NormInputs {
    NormInput tensors[SUMMED];
    Count number;

    // The tensor that a chunk or a partial sum belongs to, as `begin` says.
    ON_DEVICE const NormInput& owner(Count place, Count NormInput::*begin) const {
        int low = 0, high = (int)number;
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (tensors[middle].*begin <= place) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return tensors[low];
    }
};
static_assert(sizeof(NormInputs) == NORM_INPUTS_BYTES, "as the host lays it out");

// The sums of squares of gradients.
template <typename Gradient>
__global__ void sum_squares(NormInputs group, double* chunks) {
    const NormInput& tensor = group.owner((Count)blockIdx.x, &NormInput::chunk);
    const typename Gradient::Bits* __restrict__ values_K =
        (const typename Gradient::Bits*)tensor.gradient;
    double squares = 0;
    Count first = ((Count)blockIdx.x - tensor.chunk) * CHUNK;
    Count last = least(first + CHUNK, tensor.kept);
#pragma unroll LOADS
    for (Count k = first + threadIdx.x; k < last; k += THREADS) {
        squares += square(Gradient::load(values_K[k]));
    }
    double sum = over_threads(squares, [](double a, double b) { return a + b; });
    if (threadIdx.x == 0) chunks[blockIdx.x] = sum;
}

// The sum of each block of SUM_BLOCK kept entries, from the sums of its chunks in order.
__global__ void fold(NormInputs group, const double* chunks, Count num_partials) {
    Count place = (Count)blockIdx.x * THREADS + threadIdx.x;
    if (place >= num_partials) return;
    const NormInput& tensor = group.owner(place, &NormInput::first);
    const int each = SUM_BLOCK / CHUNK;
    Count block = place - tensor.first, first = tensor.chunk + block * each;
    Count last = least(first + each, tensor.chunk + (tensor.kept + CHUNK - 1) / CHUNK);
    double sum = 0;
    for (Count chunk = first; chunk < last; ++chunk) sum += chunks[chunk];
    tensor.partials[block] = sum;
}
