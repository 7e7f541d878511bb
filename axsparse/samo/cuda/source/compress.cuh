// From dense gradients to kept ones, with the sum of their squares, which is finite if and only if
// they are, since squares of fp32 are exact in fp64 and cannot overflow it. In every encoding a
// thread block takes CHUNK kept entries and adds in one order, so that sums have the same bits: the
// entries of a thread ascending, threads by halves of a warp, then warps and chunks in order.

const int LOADS = 4;  // reads that a thread has under way at once

// Writes the sum over all threads to the place of this chunk.
ON_DEVICE void report(double sum, double* chunks) {
    __shared__ double totals[THREADS / 32];
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(0xFFFFFFFFu, sum, distance);
    }
    if (threadIdx.x % 32 == 0) totals[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = totals[0];
    for (int warp = 1; warp < THREADS / 32; ++warp) sum += totals[warp];
    chunks[blockIdx.x] = sum;
}

ON_DEVICE double square(float value) {
    double wide = widen(value);
    return wide * wide;
}

// gradient (+)= dense at the kept positions. `chunks` is null if no sums are wanted.
template <typename Index, typename Dense, typename Gradient>
__global__ void compress(const void* dense, const void* entries, const int* offsets, Count kept,
                         Count numel, void* gradient, int accumulate, double* chunks) {
    const typename Dense::Bits* __restrict__ from_D = (const typename Dense::Bits*)dense;
    typename Gradient::Bits* __restrict__ into_K = (typename Gradient::Bits*)gradient;
    Index index(entries, offsets, kept, numel);
    double squares = 0;
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
                typename Gradient::Bits bits = Gradient::nearest(sum);
                into_K[k] = bits;
                squares += square(Gradient::load(bits));
            }
        }
        from = until;
    }
    if (chunks) report(squares, chunks);
}

// The sums of squares of gradients that replicas have already summed.
template <typename Gradient>
__global__ void judge(const void* gradient, Count kept, double* chunks) {
    const typename Gradient::Bits* __restrict__ values_K = (const typename Gradient::Bits*)gradient;
    double squares = 0;
    Count first = (Count)blockIdx.x * CHUNK, last = least(first + CHUNK, kept);
#pragma unroll LOADS
    for (Count k = first + threadIdx.x; k < last; k += THREADS) {
        squares += square(Gradient::load(values_K[k]));
    }
    report(squares, chunks);
}

// The sum of each block of SUM_BLOCK kept entries, from the sums of its chunks in order.
__global__ void fold(const double* chunks, Count num_chunks, double* partials, Count num_partials) {
    Count block = (Count)blockIdx.x * THREADS + threadIdx.x;
    if (block >= num_partials) return;
    const int each = SUM_BLOCK / CHUNK;
    Count last = least((block + 1) * each, num_chunks);
    double sum = 0;
    for (Count chunk = block * each; chunk < last; ++chunk) sum += chunks[chunk];
    partials[block] = sum;
}
