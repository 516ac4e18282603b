// Kernels with one synchronization missing, which ThreadSanitizer must find (MODE=thread); their
// complete form is run in the same way and must not be reported.
#include "emulated_child.h"
#include "kernels.h"

#if defined(__SANITIZE_THREAD__)

namespace coconet::native {

namespace {

enum class Missing { nothing, barrier, release, acquire, copy_barrier, warp_barrier, end_barrier };

struct Params {
    float* values;
    uint32_t* signal;
    float* out;
};

template <Missing missing>
__global__ void exchange(const __grid_constant__ Params p) {
    COCONET_SHARED(float[64], shared);
    COCONET_DYNAMIC_SHARED(float, copies);
    const unsigned t = threadIdx.x;

    shared[t] = static_cast<float>(t);
    if constexpr (missing != Missing::barrier) __syncthreads();
    float sum = shared[(t + 33) % 64];
    __syncthreads();

    shared[t] = sum;
    if constexpr (missing != Missing::warp_barrier) __syncwarp();
    sum += shared[t / 32 * 32 + (t + 1) % 32];

    cp_async16(copies + 4 * t, p.values + 4 * t);
    cp_async_commit();
    cp_async_wait<0>();
    if constexpr (missing != Missing::copy_barrier) __syncthreads();
    sum += copies[(4 * t + 128) % 256];

    // Block 0 sends, block 1 receives.
    if (blockIdx.x == 0) {
        store_peer(p.out + t, sum);
        if constexpr (missing != Missing::end_barrier) __syncthreads();
        if (t == 0) {
            if constexpr (missing != Missing::release)
                store_release(p.signal, 1);
            else
                store_relaxed(p.signal, 1);
        }
    } else {
        if (t == 0) {
            if constexpr (missing != Missing::acquire)
                while (load_acquire(p.signal) == 0) pause();
            else
                while (load_relaxed(p.signal) == 0) pause();
        }
        __syncthreads();
        store_peer(p.out + 64 + t, load_peer(p.out + (t + 7) % 64));
    }
}

template <Missing missing>
void exchange_once() {
    Memory<float> values(256), out(128);
    Memory<uint32_t> signal(1);
    run(exchange<missing>, blocks_of(2, 64, 256 * sizeof(float)),
        {values.data(), signal.data(), out.data()});
}

template <Missing missing>
void expect_race(const char* case_name = __builtin_FUNCTION()) {
    const std::string text = last_words(exchange_once<missing>, case_name);
    expect_in("ThreadSanitizer: data race", text);
    expect_in("emulated_races.cu", text);
}

}  // namespace

CASE(race_in_nothing) {
    for (int i = 0; i < 20; ++i) exchange_once<Missing::nothing>();
}
CASE(race_without_a_barrier) { expect_race<Missing::barrier>(); }
CASE(race_without_a_warp_barrier) { expect_race<Missing::warp_barrier>(); }
CASE(race_without_a_barrier_after_a_copy) { expect_race<Missing::copy_barrier>(); }
CASE(race_without_a_barrier_before_a_signal) { expect_race<Missing::end_barrier>(); }
CASE(race_with_relaxed_in_place_of_release) { expect_race<Missing::release>(); }
CASE(race_with_relaxed_in_place_of_acquire) { expect_race<Missing::acquire>(); }

}  // namespace coconet::native

#endif
