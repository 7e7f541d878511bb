// Moves values between dense and kept form.

// Calls `each(k, position)` for the kept entries of [start, stop) in this thread block's chunk.
template <typename Index, typename Each>
ON_DEVICE void walk(Index& index, Count start, Count stop, Each each) {
    Count first = start + (Count)blockIdx.x * CHUNK, last = least(first + CHUNK, stop);
    index.seek(first);
    for (Count from = first; from < last;) {
        Count until = index.advance(from, last);
#pragma unroll LOADS
        for (Count k = from + threadIdx.x; k < until; k += THREADS) each(k, index.position(k));
        from = until;
    }
}

// Copies all of `values_K` to or from the kept entries [start, stop).
template <typename Index, typename Bits>
__global__ void move(Bits* dense_D, const void* entries, const int* offsets, Count kept, Count numel,
                     Bits* values_K, Count start, Count stop, int into_dense) {
    Index index(entries, offsets, kept, numel);
    if (into_dense) {
        walk(index, start, stop,
             [=](Count k, Count position) { dense_D[position] = values_K[k - start]; });
    } else {
        walk(index, start, stop,
             [=](Count k, Count position) { values_K[k - start] = dense_D[position]; });
    }
}

// Writes a dense weight, zeros included, from the values of its kept entries, which are rounded to
// it. Each thread block writes one TILE.
template <typename Index, typename Weight, typename Value>
__global__ void expand(void* dense, const void* entries, const int* offsets, Count kept,
                       Count numel, const void* values) {
    const typename Value::Bits* __restrict__ values_K = (const typename Value::Bits*)values;
    typename Weight::Bits* weight_D = (typename Weight::Bits*)dense;
    Index index(entries, offsets, kept, numel);
    __shared__ __align__(16) typename Weight::Bits tile[TILE];
    Count start = (Count)blockIdx.x * TILE;
    Stretch here = index.tile(blockIdx.x);
    clear_tile(tile);
#pragma unroll LOADS
    for (Count k = here.begin + threadIdx.x; k < here.end; k += THREADS) {
        tile[index.position(k) - start] = Weight::weight(Value::load(values_K[k]));
    }
    __syncthreads();
    write_tile(weight_D + start, tile, (int)least(TILE, numel - start));
}
