// Exact sums (samo/fixed_point.py): gradients added as integers, and made of the sums.

// sums (+)= round(dense · scale) at the kept positions, ties to even. `scale` has the bits of an
// fp64 number.
template <typename Index, typename Dense>
__global__ void add_exact(const void* dense, const void* entries, const int* offsets, Count kept,
                          Count numel, Count* sums, Count scale, unsigned* most, int accumulate) {
    const typename Dense::Bits* __restrict__ from_D = (const typename Dense::Bits*)dense;
    Index index(entries, offsets, kept, numel);
    double wide_scale = __longlong_as_double(scale);
    unsigned largest = 0;
    walk(index, 0, kept, [&](Count k, Count position) {
        float value = Dense::load(from_D[position]);
        unsigned size = __float_as_uint(value) & 0x7FFFFFFFu;
        if (size > largest) largest = size;
        Count integer = nearest_integer(widen(value) * wide_scale);
        sums[k] = accumulate ? sums[k] + integer : integer;
    });
    // As bits, NaN is larger than infinity.
    largest = over_threads(largest, [](unsigned a, unsigned b) { return a > b ? a : b; });
    if (threadIdx.x == 0) atomicMax(most, largest);
}

// Replaces the sums [first, last) by the fp32 numbers that they stand for: entry k is the k-th fp32
// number of the same memory, where the sum k / 2 was. A thread block reads all of its sums before
// it writes; more than one may run if last <= 2 · first, so that no block writes what another has
// to read. `unit` has the bits of an fp64 number.
__global__ void finish_exact(Count* sums, Count first, Count last, Count unit) {
    float own[CHUNK / THREADS];
    double wide_unit = __longlong_as_double(unit);
    Count begin = first + (Count)blockIdx.x * CHUNK + threadIdx.x;
#pragma unroll
    for (int i = 0; i < CHUNK / THREADS; ++i) {
        Count k = begin + i * THREADS;
        own[i] = k < last ? narrow((double)sums[k] * wide_unit) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < CHUNK / THREADS; ++i) {
        Count k = begin + i * THREADS;
        if (k < last) ((float*)sums)[k] = own[i];
    }
}
