#include "crc32c.h"

#include <array>

#include "unaligned.h"

#if defined(COMPCOLL_X86)
#include <nmmintrin.h>
#endif

namespace compcoll {

namespace {

constexpr uint32_t polynomial = 0x82f63b78;  // reflected
constexpr uint32_t ends = 0xffffffff;        // initial value of the register, and its final XOR

// table[k][b]: the register after byte b and k zero bytes.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t b = 0; b < 256; ++b) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? polynomial : 0);
        tables[0][b] = crc;
    }
    for (size_t k = 1; k < 8; ++k)
        for (size_t b = 0; b < 256; ++b) tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 255];
    return tables;
}

constexpr Tables tables = make_tables();

uint32_t one_byte(uint32_t crc, uint8_t byte) { return crc >> 8 ^ tables[0][(crc ^ byte) & 255]; }

// Eight bytes at a time, one table look-up for each. M. Kounavis, F. Berry, "A Systematic Approach to Building High Performance
// Software-Based CRC Generators", ISCC 2005.
uint32_t portable(uint32_t crc, const uint8_t* at, size_t n) {
    for (; n >= 8; at += 8, n -= 8) {
        const uint64_t word = load<uint64_t>(at) ^ crc;
        crc = 0;
        for (int byte = 0; byte < 8; ++byte) crc ^= tables[7 - byte][word >> (8 * byte) & 255];
    }
    for (; n > 0; ++at, --n) crc = one_byte(crc, *at);
    return crc;
}

#if defined(COMPCOLL_X86)

constexpr size_t stretch = 1024;  // bytes of each of three streams, which hide the instruction's latency

// How `stretch` zero bytes change a register. The map is linear, so each of its bytes has a table.
using Shift = std::array<std::array<uint32_t, 256>, 4>;

constexpr Shift make_shift() {
    Shift shift{};
    for (size_t byte = 0; byte < 4; ++byte) {
        for (size_t bit = 0; bit < 8; ++bit) {
            uint32_t crc = uint32_t(1) << (8 * byte + bit);
            for (size_t zero = 0; zero < stretch; ++zero) crc = crc >> 8 ^ tables[0][crc & 255];
            shift[byte][size_t(1) << bit] = crc;
        }
        for (size_t b = 1; b < 256; ++b) shift[byte][b] = shift[byte][b & (b - 1)] ^ shift[byte][b & (0 - b)];
    }
    return shift;
}

constexpr Shift shift = make_shift();

uint32_t after_a_stretch(uint32_t crc) {
    return shift[0][crc & 255] ^ shift[1][crc >> 8 & 255] ^ shift[2][crc >> 16 & 255] ^ shift[3][crc >> 24];
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t crc, const uint8_t* at, size_t n) {
    for (; n >= 3 * stretch; at += 3 * stretch, n -= 3 * stretch) {
        uint64_t first = crc, second = 0, third = 0;
        for (size_t i = 0; i < stretch; i += 8) {
            first = _mm_crc32_u64(first, load<uint64_t>(at + i));
            second = _mm_crc32_u64(second, load<uint64_t>(at + stretch + i));
            third = _mm_crc32_u64(third, load<uint64_t>(at + 2 * stretch + i));
        }
        const uint32_t both = after_a_stretch(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
        crc = after_a_stretch(both) ^ static_cast<uint32_t>(third);
    }
    uint64_t wide = crc;
    for (; n >= 8; at += 8, n -= 8) wide = _mm_crc32_u64(wide, load<uint64_t>(at));
    crc = static_cast<uint32_t>(wide);
    for (; n > 0; ++at, --n) crc = _mm_crc32_u8(crc, *at);
    return crc;
}

#endif

}  // namespace

uint32_t crc32c_portable(const uint8_t* bytes, size_t n) { return ~portable(ends, bytes, n); }

uint32_t crc32c(const uint8_t* bytes, size_t n) {
#if defined(COMPCOLL_X86)
    if (__builtin_cpu_supports("sse4.2")) return ~by_instruction(ends, bytes, n);
#endif
    return crc32c_portable(bytes, n);
}

}  // namespace compcoll
