// Copies for another core, both ways: into one cache, and past this core's caches. The clock says which way: of stores that take long,
// or no time. Nothing beside what is copied is touched, and another thread that sees the number sees all that was copied before.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "copies.h"

namespace {

struct Told {
    using duration = std::chrono::nanoseconds;
    using rep = duration::rep;
    using period = duration::period;
    using time_point = std::chrono::time_point<Told>;
    static inline duration each{};  // look at the clock
    static inline duration time{};
    static time_point now() { return time_point(time += each); }
};

using Copies = compcoll::CopiesForAnotherCore<Told>;
constexpr size_t line = 64, most = 40'000;

[[noreturn]] void failed(const char* what, size_t nbytes) {
    std::printf("%s: %zu bytes\n", what, nbytes);
    std::exit(1);
}

void copied_and_nothing_else(const Copies& copies) {
    std::vector<uint8_t> from(most + line), memory(most + 3 * line);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 131 + i / 251 + 1);
    uint8_t* to = memory.data() + line - reinterpret_cast<uintptr_t>(memory.data()) % line;
    for (const size_t nbytes : {size_t{0}, size_t{1}, size_t{63}, size_t{4096}, size_t{8191}, size_t{8192}, size_t{8193}, size_t{8255},
                                size_t{16384}, size_t{20'001}, most})
        for (const size_t offset : {0, 1, 4, 16, 33}) {
            std::fill(memory.begin(), memory.end(), uint8_t{0});
            copies.copy(to, from.data() + offset, nbytes);
            for (size_t i = 0; i < most + line; ++i)
                if (to[i] != (i < nbytes ? from[offset + i] : 0)) failed("wrong bytes", nbytes);
            if (to[-1] != 0) failed("bytes before it", nbytes);
        }
}

void seen_in_order(Copies& copies, uint64_t rounds) {
    constexpr size_t nbytes = 16'384;
    alignas(line) static uint8_t memory[nbytes];
    alignas(2 * line) static std::atomic<uint64_t> written{0}, read{0};
    written = read = 0;
    std::thread other([&] {
        for (uint64_t round = 1; round <= rounds; ++round) {
            while (written.load() != round) std::this_thread::yield();
            for (const uint8_t byte : memory)
                if (byte != static_cast<uint8_t>(round)) failed("seen too early", round);
            read.store(round);
        }
    });
    std::vector<uint8_t> from(nbytes);
    for (uint64_t round = 1; round <= rounds; ++round) {
        while (read.load() + 1 != round) std::this_thread::yield();
        std::fill(from.begin(), from.end(), static_cast<uint8_t>(round));
        copies.copy(memory, from.data(), nbytes);
        copies.store(written, round);
    }
    other.join();
}

}  // namespace

int main(int, char** words) {
    const uint64_t rounds = std::strtoull(words[1], nullptr, 10);
    std::atomic<uint64_t> number{0};
    for (const auto each : {std::chrono::nanoseconds(0), std::chrono::nanoseconds(200)}) {
        Told::each = each;
        Copies copies;
        for (uint64_t i = 1; i <= 10; ++i) {
            copies.store(number, i);
            if (number.load() != i) failed("not stored", i);
        }
        copied_and_nothing_else(copies);
        seen_in_order(copies, rounds);
    }
    std::printf("copied\n");
}
