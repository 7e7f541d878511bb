// The positions of kept entries, in every encoding. A thread block reads them in one of two ways:
//
//     tile(n)                 the kept entries of the n-th TILE of dense positions
//     seek(k), advance(k, l)  from kept entry k on; `advance` returns the end of what is ready
//
// After either, `position(k)` is the dense position of a kept entry; after `advance` each thread
// asks for ascending k. All threads of a block call tile, seek and advance together.

// The first i in [low, high) with values[i] >= key, `high` if there is none, and the same for
// `other`. Both are found together, since a round takes as long as one read. In each round every
// thread probes one place for each key, so that the range shrinks to one of 129 pieces.
template <typename Value>
ON_DEVICE Stretch lower_bounds(const Value* values, Count low, Count high, Count key, Count other) {
    Count lows[] = {low, low}, highs[] = {high, high}, keys[] = {key, other};
    while (lows[0] < highs[0] || lows[1] < highs[1]) {
        Count steps[2];
        bool is_below[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            steps[i] = (highs[i] - lows[i]) / (THREADS + 1) + 1;
            Count probe = lows[i] + ((Count)threadIdx.x + 1) * steps[i] - 1;
            is_below[i] = probe < highs[i] && (Count)values[probe] < keys[i];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int below = __syncthreads_count(is_below[i]);
            highs[i] = least(highs[i], lows[i] + (below + 1) * steps[i] - 1);
            lows[i] += below * steps[i];
        }
    }
    return {lows[0], lows[1]};
}

// The sum over the threads before this one.
ON_DEVICE int sum_before(int value) {
    __shared__ int totals[THREADS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
    for (int distance = 1; distance < 32; distance *= 2) {
        int other = from_lane_before(sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    for (int before = 0; before < warp; ++before) sum += totals[before];
    return sum - value;
}

// Writes the places of the set bits of all threads' words to `places`, in order. Other threads may
// read the old contents until the last one calls this, since `sum_before` has a barrier.
ON_DEVICE void spread(unsigned word, unsigned short* places) {
    int at = sum_before(__popc(word));
    for (; word != 0; word &= word - 1) {
        places[at++] = (unsigned short)(threadIdx.x * 32 + __ffs(word) - 1);
    }
    __syncthreads();
}

struct FullIndex {
    Count numel;

    ON_DEVICE FullIndex(const void*, const int*, Count, Count numel) : numel(numel) {}

    ON_DEVICE Stretch tile(Count number) {
        return {number * TILE, least((number + 1) * TILE, numel)};
    }
    ON_DEVICE void seek(Count) {}
    ON_DEVICE Count advance(Count, Count until) { return until; }
    ON_DEVICE Count position(Count k) { return k; }
};

struct Int32Index {
    const int* __restrict__ positions;
    Count kept;

    ON_DEVICE Int32Index(const void* entries, const int*, Count kept, Count)
        : positions((const int*)entries), kept(kept) {}

    ON_DEVICE Stretch tile(Count number) {
        return lower_bounds(positions, 0, kept, number * TILE, (number + 1) * TILE);
    }
    ON_DEVICE void seek(Count) {}
    ON_DEVICE Count advance(Count, Count until) { return until; }
    ON_DEVICE Count position(Count k) { return positions[k]; }
};

struct MaskIndex {
    const unsigned* __restrict__ words;
    const int* __restrict__ offsets;
    Count blocks, num_words, number, begin;
    unsigned short* places;

    ON_DEVICE MaskIndex(const void* entries, const int* offsets, Count, Count numel)
        : words((const unsigned*)entries),
          offsets(offsets),
          blocks((numel + MASK_BLOCK - 1) / MASK_BLOCK),
          num_words((numel + MASK_WORD - 1) / MASK_WORD * (MASK_WORD / 32)),
          number(0),
          begin(0) {
        __shared__ unsigned short shared_places[TILE];
        places = shared_places;
    }

    ON_DEVICE Stretch tile(Count tile) {
        number = tile;
        begin = offsets[tile * (TILE / MASK_BLOCK)];
        Count end = offsets[least((tile + 1) * (TILE / MASK_BLOCK), blocks)];
        Count at = tile * THREADS + threadIdx.x;
        spread(at < num_words ? words[at] : 0u, places);  // read while the offsets are
        return {begin, end};
    }
    ON_DEVICE void seek(Count k) {
        Count block = lower_bounds(offsets, 0, blocks + 1, k + 1, k + 1).begin - 1;
        number = block / (TILE / MASK_BLOCK) - 1;
    }
    ON_DEVICE Count advance(Count from, Count until) {
        Stretch next;
        do next = tile(number + 1);
        while (next.end <= from);
        return least(next.end, until);
    }
    ON_DEVICE Count position(Count k) { return number * TILE + places[k - begin]; }
};
