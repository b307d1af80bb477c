// The passes of integer_quantizer_passes.h. Each instruction set compiles them. Everything here is in an unnamed namespace, so that
// the linker never mixes functions of two sets.
#pragma once

#include "integer_quantizer_passes.h"
#include "integer_quantizer.h"
#include "unaligned.h"

namespace compcoll {
namespace {

// Call work(begin, end, b) for each block.
template <class Work>
void for_blocks(size_t n, size_t block, const Work& work) {
    for (size_t begin = 0, b = 0; begin < n; begin += block, ++b) work(begin, n - begin < block ? n : begin + block, b);
}

template <class T, class Bits>
void survey(const T* values, size_t n, size_t block, Bits* largest) {
    for_blocks(n, block, [&](size_t begin, size_t end, size_t b) {
        Bits most = 0;
        for (size_t i = begin; i < end; ++i) {
            const Bits bits = bits_as<Bits>(values[i]) & (~Bits(0) >> 1);
            most = bits > most ? bits : most;
        }
        largest[b] = most;
    });
}

template <class Number, class T, class Bits>
void to_levels_of(const T* values, size_t n, size_t block, const Bits* largest, int32_t levels, uint8_t* numbers, T* lost) {
    for_blocks(n, block, [&](size_t begin, size_t end, size_t b) {
        const IntegerSteps<T> steps(bits_as<T>(largest[b]), levels);
        if (lost == nullptr) {
            for (size_t i = begin; i < end; ++i)
                store(numbers + i * sizeof(Number), static_cast<Number>(static_cast<int32_t>(steps.level(values[i]))));
            return;
        }
        for (size_t i = begin; i < end; ++i) {
            const T level = steps.level(values[i]);
            store(numbers + i * sizeof(Number), static_cast<Number>(static_cast<int32_t>(level)));
            lost[i] = steps.lost(values[i], level);
        }
    });
}

template <class T, class Bits>
void to_levels(
    const T* values, size_t n, size_t block, const Bits* largest, int32_t levels, int nbytes, uint8_t* numbers, T* lost) {
    if (nbytes == 1) return to_levels_of<int8_t>(values, n, block, largest, levels, numbers, lost);
    if (nbytes == 2) return to_levels_of<int16_t>(values, n, block, largest, levels, numbers, lost);
    to_levels_of<int32_t>(values, n, block, largest, levels, numbers, lost);
}

template <class Number, class T, class Bits>
void from_levels_of(const uint8_t* numbers, size_t n, size_t block, const Bits* largest, int32_t levels, T* values) {
    for_blocks(n, block, [&](size_t begin, size_t end, size_t b) {
        const IntegerSteps<T> steps(bits_as<T>(largest[b]), levels);
        for (size_t i = begin; i < end; ++i) values[i] = steps.value(load<Number>(numbers + i * sizeof(Number)));
    });
}

template <class T, class Bits>
void from_levels(const uint8_t* numbers, int nbytes, size_t n, size_t block, const Bits* largest, int32_t levels, T* values) {
    if (nbytes == 1) return from_levels_of<int8_t>(numbers, n, block, largest, levels, values);
    if (nbytes == 2) return from_levels_of<int16_t>(numbers, n, block, largest, levels, values);
    from_levels_of<int32_t>(numbers, n, block, largest, levels, values);
}

template <class Field, class T>
void to_fields(const T* values, size_t n, uint8_t* numbers) {
    for (size_t i = 0; i < n; ++i) store(numbers + i * sizeof(Field), static_cast<Field>(vote(values[i])));
}

template <class T>
void to_votes(const T* values, size_t n, int width, uint8_t* numbers) {
    if (width == 8) return to_fields<uint8_t>(values, n, numbers);
    if (width == 16) return to_fields<uint16_t>(values, n, numbers);
    if (width == 32) return to_fields<uint32_t>(values, n, numbers);
    const size_t fields = static_cast<size_t>(8 / width);
    for (size_t i = 0; i < n; i += fields) {
        uint32_t bits = 0;
        for (size_t k = 0; k < fields && i + k < n; ++k) bits |= vote(values[i + k]) << (static_cast<size_t>(width) * k);
        *numbers++ = static_cast<uint8_t>(bits);
    }
}

template <class T, class Bits, class Votes>
void verdicts(size_t n, size_t block, const Bits* largest, uint32_t ranks, T* values, const Votes& votes) {
    for_blocks(n, block, [&](size_t begin, size_t end, size_t b) {
        const bool finite = is_finite(bits_as<T>(largest[b]));
        for (size_t i = begin; i < end; ++i) values[i] = finite ? verdict<T>(votes(i), ranks) : quiet_nan<T>();
    });
}

template <class T, class Bits>
void from_votes(
    const uint8_t* numbers, int width, uint32_t ranks, size_t n, size_t block, const Bits* largest, T* values) {
    const size_t w = static_cast<size_t>(width);
    if (w == 32) return verdicts(n, block, largest, ranks, values, [&](size_t i) { return load<uint32_t>(numbers + 4 * i); });
    if (w == 16)
        return verdicts(n, block, largest, ranks, values, [&](size_t i) { return uint32_t(load<uint16_t>(numbers + 2 * i)); });
    verdicts(n, block, largest, ranks, values,
             [&](size_t i) { return uint32_t(numbers[i * w / 8]) >> i * w % 8 & ((1u << w) - 1); });
}

// For each bit of a row, count the rows in which it is set: eight one-byte counts per byte of a row.
inline void count_bits(const uint8_t* rows, size_t ranks, size_t stride, size_t nbytes, uint64_t* counts) {
    for (size_t i = 0; i < nbytes; ++i) counts[i] = 0;
    for (size_t rank = 0; rank < ranks; ++rank)
        for (size_t i = 0; i < nbytes; ++i) {
            const uint64_t byte = rows[rank * stride + i];
            // Seven copies, each shifted by seven more bits, move seven bits to the beginnings of bytes without overlap.
            counts[i] += ((byte & 0x7f) * 0x0002040810204081u & 0x0101010101010101u) + (byte >> 7 << 56);
        }
}

template <class T>
void from_bits(const uint8_t* rows, size_t ranks, size_t stride, size_t n, size_t block, const uint8_t* marks, T* values) {
    constexpr size_t tile = 2048;
    uint64_t negative[tile / 8], voters[tile / 8];
    const auto counts = reinterpret_cast<const uint8_t*>(negative), most = reinterpret_cast<const uint8_t*>(voters);
    const uint8_t* not_zero = rows + (n + 7) / 8;
    for_blocks(n, block, [&](size_t begin, size_t end, size_t b) {
        if (marks[b] == something_not_finite) {
            for (size_t i = begin; i < end; ++i) values[i] = quiet_nan<T>();
            return;
        }
        for (; begin < end; begin += tile) {
            const size_t count = end - begin < tile ? end - begin : tile, nbytes = (count + 7) / 8;
            count_bits(rows + begin / 8, ranks, stride, nbytes, negative);
            if (marks[b] == some_zeros) {
                count_bits(not_zero, ranks, stride, nbytes, voters);
                not_zero += nbytes;
            } else {
                for (size_t i = 0; i < nbytes; ++i) voters[i] = ranks * 0x0101010101010101u;
            }
            for (size_t i = 0; i < count; ++i)
                values[begin + i] = verdict<T>(most[i], 2u * counts[i]);
        }
    });
}

template <class T>
constexpr IntegerQuantizerFunctions<T> functions_of = {survey<T>, to_levels<T>, from_levels<T>, to_votes<T>, from_votes<T>, from_bits<T>};

constexpr IntegerQuantizerPasses these_integer_quantizer = {functions_of<float>, functions_of<double>};

}  // namespace
}  // namespace compcoll
