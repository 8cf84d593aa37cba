// Threads of torch's OpenMP pool. A function inside never starts another parallel region.
#pragma once

#include <omp.h>

#include <cstdint>

namespace megarl {

int thread_count();  // as in torch.get_num_threads()

// All threads for so many multiply-adds, or one: where a barrier is dear, a second thread costs more than it gives.
int64_t threads_for(int64_t work);

constexpr int64_t ELEMENT_WORK = 16;  // multiply-adds that take as long as a few operations on one element

// Calls f(first, last) on each thread's contiguous share of [0, count).
template <typename F>
void parallel_parts(int64_t count, int64_t threads, const F& f) {
    if (threads <= 1 || count <= 1 || omp_in_parallel()) {
        if (count > 0) f(int64_t(0), count);
        return;
    }
#pragma omp parallel num_threads(int(threads))
    {
        int64_t i = omp_get_thread_num(), n = omp_get_num_threads();
        int64_t first = count * i / n, last = count * (i + 1) / n;
        if (first < last) f(first, last);
    }
}

// Calls f(i) for i in [0, count), on all threads if the work is worth it.
template <typename F>
void parallel_for(int64_t count, int64_t work, const F& f) {
    parallel_parts(count, threads_for(work), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) f(i);
    });
}

}  // namespace megarl
