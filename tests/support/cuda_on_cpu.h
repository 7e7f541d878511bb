// Runs CUDA kernels on a CPU: every thread is a fiber, and a thread block runs its fibers from
// one barrier to the next, in an order that is drawn anew each time, so that a barrier that is
// missing shows. Thread blocks run one after another, also in a drawn order. The arithmetic is that
// of device.cuh for AMD's GPUs, which is plain C++.

#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <type_traits>
#include <utility>

#define __HIP__
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Place {
    unsigned x;
};
static Place threadIdx, blockIdx;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// -- fibers -------------------------------------------------------------------------------------

enum State { READY, AT_BLOCK, AT_WARP, DONE };

struct Fiber {
    State state;
    bool started;
    unsigned long exchanges;
    jmp_buf at;
    ucontext_t context;
    alignas(16) char stack[1 << 16];
};

static Fiber fibers[THREADS];
static jmp_buf scheduler;
static unsigned current;
static void (*entry)(void*);
static void* entry_data;
static uint64_t random_state;
static uint64_t exchanged[2][THREADS];
static int votes[2][THREADS];
static unsigned long barriers[THREADS];

static unsigned draw(unsigned below) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)((random_state >> 33) % below);
}

template <typename Item>
static void shuffle(Item* items, unsigned count) {
    for (unsigned i = count; i > 1; --i) std::swap(items[i - 1], items[draw(i)]);
}

__attribute__((noinline)) static void wait_for(State state) {
    fibers[current].state = state;
    if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1);
}

static void run_fiber() {
    entry(entry_data);
    fibers[current].state = DONE;
    _longjmp(scheduler, 1);
}

static void resume(unsigned thread) {
    current = threadIdx.x = thread;
    if (_setjmp(scheduler)) return;
    if (fibers[thread].started) _longjmp(fibers[thread].at, 1);
    fibers[thread].started = true;
    setcontext(&fibers[thread].context);
}

// False if threads wait for one another for ever.
static bool run_block() {
    static unsigned order[THREADS];
    for (unsigned t = 0; t < THREADS; ++t) {
        Fiber& fiber = fibers[t];
        fiber.state = READY;
        fiber.started = false;
        fiber.exchanges = barriers[t] = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = sizeof(fiber.stack);
        makecontext(&fiber.context, run_fiber, 0);
        order[t] = t;
    }
    for (;;) {
        shuffle(order, THREADS);
        for (volatile unsigned i = 0; i < THREADS; i = i + 1) {
            if (fibers[order[i]].state == READY) resume(order[i]);
        }
        unsigned in_block = 0, done = 0;
        bool released = false;
        for (unsigned warp = 0; warp < THREADS; warp += 32) {
            unsigned in_warp = 0, left = 0;
            for (unsigned t = warp; t < warp + 32; ++t) {
                in_warp += fibers[t].state == AT_WARP;
                left += fibers[t].state == DONE;
                in_block += fibers[t].state == AT_BLOCK;
            }
            done += left;
            if (in_warp == 32) {  // masks name the whole warp, so nobody may have left
                released = true;
                for (unsigned t = warp; t < warp + 32; ++t) fibers[t].state = READY;
            }
        }
        if (done == THREADS) return true;
        if (in_block + done == THREADS) {
            released = true;
            for (unsigned t = 0; t < THREADS; ++t) {
                if (fibers[t].state == AT_BLOCK) fibers[t].state = READY;
            }
        }
        if (!released) return false;
    }
}

// -- what CUDA has ------------------------------------------------------------------------------

inline int __syncthreads_count(bool vote) {
    unsigned thread = current;
    int* round = votes[barriers[thread]++ % 2];
    round[thread] = vote;
    wait_for(AT_BLOCK);
    int count = 0;
    for (unsigned t = 0; t < THREADS; ++t) count += round[t];
    return count;
}

inline void __syncthreads() { __syncthreads_count(false); }

template <typename Value>
inline Value exchange(Value value, int distance) {
    unsigned thread = current;
    uint64_t* slots = exchanged[fibers[thread].exchanges++ % 2];
    memcpy(&slots[thread], &value, sizeof(value));
    wait_for(AT_WARP);
    int from = (int)thread + distance;
    if (from / 32 == (int)thread / 32 && from >= 0) memcpy(&value, &slots[from], sizeof(value));
    return value;
}

template <typename Value>
inline Value __shfl_up(Value value, int distance, int) {
    return exchange(value, -distance);
}

template <typename Value>
inline Value __shfl_down(Value value, int distance, int) {
    return exchange(value, distance);
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(unsigned word) { return __builtin_ffs((int)word); }

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline double __longlong_as_double(long long bits) {
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// Fibers take turns at barriers only, so that nothing comes between.
inline void atomicMax(unsigned* place, unsigned value) {
    if (value > *place) *place = value;
}

inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// -- calls from outside -------------------------------------------------------------------------

template <typename Value>
constexpr char code_of() {
    if (std::is_pointer<Value>::value) return 'p';
    if (std::is_class<Value>::value) return 's';
    if (std::is_same<Value, float>::value) return 'f';
    return std::is_same<Value, int>::value ? 'i' : std::is_same<Value, long long>::value ? 'l' : '?';
}

template <typename... Arguments>
struct Emulated {
    void (*kernel)(Arguments...);
    void** arguments;

    template <size_t... N>
    void call(std::index_sequence<N...>) {
        kernel(*(typename std::remove_const<Arguments>::type*)arguments[N]...);
    }

    static void enter(void* data) {
        ((Emulated*)data)->call(std::make_index_sequence<sizeof...(Arguments)>());
    }
};

// What a kernel takes: p pointer, l 64 bits, i 32 bits, f float, s structure.
template <typename... Arguments>
const char* signature(void (*)(Arguments...)) {
    static const char codes[] = {code_of<Arguments>()..., 0};
    return codes;
}

template <typename... Arguments>
int emulate(void (*kernel)(Arguments...), unsigned blocks, uint64_t seed, void** arguments) {
    Emulated<Arguments...> call = {kernel, arguments};
    entry = Emulated<Arguments...>::enter;
    entry_data = &call;
    random_state = seed;
    unsigned* order = new unsigned[blocks];
    for (unsigned block = 0; block < blocks; ++block) order[block] = block;
    shuffle(order, blocks);
    bool good = true;
    for (unsigned turn = 0; turn < blocks && good; ++turn) {
        blockIdx.x = order[turn];
        good = run_block();
    }
    delete[] order;
    return good ? 0 : 1;
}
