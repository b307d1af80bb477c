// Sleep until a word of memory changes, and wake sleepers, by Linux's futex: std::atomic::wait has no timeout and does not work
// between processes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace compcoll {

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == sizeof(uint32_t), "the kernel looks at it");

// Who shares the word: threads of one process, or processes with common memory.
enum class Among : int { threads = FUTEX_PRIVATE_FLAG, processes = 0 };

// Sleep while the word has this value: until woken, a signal, or a timeout of `most` (zero: no timeout).
inline void sleep_while(Word& word, uint32_t value, Among among, std::chrono::nanoseconds most = {}) {
    const timespec time{static_cast<time_t>(most.count() / 1'000'000'000), static_cast<long>(most.count() % 1'000'000'000)};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT | static_cast<int>(among), value,
            most.count() ? &time : nullptr, nullptr, 0);
}

// Wake at most `most` sleepers on the word.
inline void wake(Word& word, Among among, int most = INT_MAX) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE | static_cast<int>(among), most, nullptr, nullptr, 0);
}

// Sleep on a word shared by processes, unless ready(). `asleep` holds `wanted` meanwhile, so that other processes wake only a
// sleeper. They must make it ready, then check `asleep`, then change the word and wake.
template <class Wanted, class Ready>
void sleep_unless(Ready ready, Word& word, std::atomic<Wanted>& asleep, Wanted wanted, std::chrono::nanoseconds most) {
    const uint32_t before = word.load();
    asleep.store(wanted);
    if (!ready()) sleep_while(word, before, Among::processes, most);
    asleep.store(0);
}

// Pause between two polls of memory that another core will write.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace compcoll
