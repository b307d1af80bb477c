// The mx codec's loops, written for the compiler's vectorizer. Each instruction set compiles them. Everything here is in an unnamed
// namespace, so that the linker never mixes functions of two sets.
#pragma once

#include "mx_codes.h"

namespace compcoll {
namespace {

template <class Element, bool rotated, class T>
COMPCOLL_HD void encode_block(const T* values, size_t n, uint8_t* wire) {
    alignas(64) T x[mx_block];
    load_run(values, n, x);
    if (rotated) rotate(x);
    *wire = MX<T>::template header<Element>(largest_magnitude(x, mx_block), rotated);
    if (!MX<T>::has_codes(*wire)) return void(std::memset(wire + 1, 0, (n * Element::bits + 7) / 8));
    const typename MX<T>::template Encoder<Element> encoder(*wire);
    alignas(64) Code codes[mx_block];
    for (int i = 0; i < mx_block; ++i) codes[i] = static_cast<Code>(encoder.code(x[i]));
    store_codes<Element::bits>(codes, n, wire + 1);
}

template <class Element, bool rotated, bool add, class T>
COMPCOLL_HD void decode_block(const uint8_t* wire, size_t n, const T* base, T* values) {
    if (!MX<T>::has_codes(*wire)) return fill<add>(MX<T>::only_value(*wire), n, base, values);
    const typename MX<T>::template Decoder<Element> decoder(*wire);
    alignas(64) uint8_t codes[mx_block];
    alignas(64) T x[mx_block];
    load_codes<Element::bits>(wire + 1, n, codes);
    for (int i = 0; i < mx_block; ++i) x[i] = decoder.value(codes[i]);
    if (rotated) rotate_back(x);
    SAME_OR_APART for (size_t i = 0; i < n; ++i) put<add>(values + i, base + i, x[i]);
}

template <class Element>
size_t record_at(size_t i) {
    return i / mx_block * (1 + mx_block * Element::bits / 8);
}

template <class T>
void encode(const T* values, size_t n, uint8_t* wire, Config config) {
    with_element(config.first, [=](auto element) {
        using Element = decltype(element);
        for_runs(config.first >= mx_rotation, n, [=](auto rotated, size_t i, auto length) {
            encode_block<Element, rotated>(values + i, length, wire + record_at<Element>(i));
        });
    });
}

template <bool add, class T>
void decode(const uint8_t* wire, size_t n, const T* base, T* values, Config config) {
    with_element(config.first, [=](auto element) {
        using Element = decltype(element);
        for_runs(config.first >= mx_rotation, n, [=](auto rotated, size_t i, auto length) {
            decode_block<Element, rotated, add>(wire + record_at<Element>(i), length, base + i, values + i);
        });
    });
}

template <class T>
constexpr TileFunctions<T> functions = {encode<T>, decode<false, T>, decode<true, T>};

constexpr Kernels these_mx = {functions<float>, functions<double>};

}  // namespace
}  // namespace compcoll
