// Threads that help whoever has work. The one who asks works as well and waits for nobody who has
// not begun, so a helper that sleeps, or whose core somebody else has, holds nothing up. OpenMP
// waits for all: its threads halved the tokens of a host with busy clients when they spun, and when
// they slept, took a quarter off those of a quiet one.

#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace carpool {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#endif
}

class Pool {
  public:
    // Calls work(0) to work(count - 1), each once, from up to `threads` threads.
    template <class Work>
    void run(int64_t count, int threads, const Work& work) {
        if (threads <= 1 || count <= 1 || !busy.try_lock()) {
            for (int64_t i = 0; i < count; ++i) work(i);
            return;
        }
        const std::lock_guard<std::mutex> lock(busy, std::adopt_lock);
        for (; helpers < threads - 1; ++helpers) std::thread(&Pool::help, this, helpers).detach();
        job = {[](const void* of, int64_t i) { (*static_cast<const Work*>(of))(i); }, &work, count,
               threads - 1};
        next = 0;
        const uint32_t number = epoch + 1;
        open = number;
        epoch = number;
        epoch.notify_all();
        take();
        open = 0;  // who has not begun by now finds nothing
        for (int spun = 0; inside != 0; ++spun)
            spun < SPINS ? pause() : std::this_thread::yield();
    }

  private:
    struct Job {
        void (*call)(const void*, int64_t);
        const void* work;
        int64_t count;
        int helpers;
    };

    static constexpr int SPINS = 4000;  // tens of microseconds: the next call is often that near

    void take() {
        for (int64_t i; (i = next.fetch_add(1)) < job.count;) job.call(job.work, i);
    }

    void help(int index) {
        for (uint32_t seen = 0;;) {
            for (int spun = 0; epoch == seen && spun < SPINS; ++spun) pause();
            epoch.wait(seen);
            seen = epoch;
            inside += 1;  // first, so that a job that is still open stays open
            if (open == seen && index < job.helpers) take();
            inside -= 1;
        }
    }

    std::mutex busy;
    Job job = {};
    int helpers = 0;
    alignas(64) std::atomic<int64_t> next = 0;
    alignas(64) std::atomic<uint32_t> epoch = 0;
    std::atomic<uint32_t> open = 0;
    alignas(64) std::atomic<int> inside = 0;
};

// One for all of this room's functions; never destroyed, as its threads may outlive everything.
inline Pool& pool() {
    static Pool* shared = new Pool;
    return *shared;
}

}  // namespace carpool
