#include "sparse_wire.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "sparse.h"
#include "unaligned.h"

namespace compcoll {

namespace {

constexpr uint32_t longest_gap = 0xffff;
constexpr uint32_t index_mask = most_packed_elements - 1;

// Call entry(uint16_t) for each 16-bit entry of the runs of the indices.
template <class Entry>
void for_each_run(const uint32_t* indices, size_t count, Entry entry) {
    uint64_t next = 0;  // the element after the last one sent
    for (size_t i = 0; i < count; ++i) {
        uint64_t gap = indices[i] - next;
        for (; gap >= longest_gap; gap -= longest_gap) entry(static_cast<uint16_t>(longest_gap));
        entry(static_cast<uint16_t>(gap));
        next = uint64_t(indices[i]) + 1;
    }
}

template <class T>
size_t values_nbytes(size_t count, ValueFormat format) {
    if (format == ValueFormat::sign) return (count + 7) / 8;
    if (format == ValueFormat::power) return (count + 1) / 2;
    return count * sizeof(T);
}

}  // namespace

template <class T>
size_t sparse_nbytes(const Chosen<T>& chosen, IndexFormat indices, ValueFormat values) {
    size_t nbytes = sparse_header_nbytes;
    if (indices == IndexFormat::packed) return nbytes + 4 * chosen.count;
    nbytes += values_nbytes<T>(chosen.count, values);
    if (indices == IndexFormat::pairs) return nbytes + 4 * chosen.count;
    if (indices == IndexFormat::mask) return nbytes + (chosen.n + 7) / 8;
    for_each_run(chosen.indices, chosen.count, [&nbytes](uint16_t) { nbytes += 2; });
    return nbytes;
}

template <class T>
void write_sparse(
    const Chosen<T>& chosen, IndexFormat indices, ValueFormat values, double step, int top, uint8_t* wire) {
    wire[0] = static_cast<uint8_t>(indices);
    wire[1] = static_cast<uint8_t>(values);
    wire[2] = sizeof(T);
    wire[3] = 0;
    store(wire + 4, static_cast<int32_t>(top));
    store(wire + 8, step);
    store(wire + 16, chosen.n);
    store(wire + 24, static_cast<uint64_t>(chosen.count));
    uint8_t* at = wire + sparse_header_nbytes;
    const auto value = [&chosen](size_t i) { return load<T>(chosen.values + i); };
    if (indices == IndexFormat::packed) {
        for (size_t i = 0; i < chosen.count; ++i) {
            const auto code = static_cast<uint32_t>(power_code(value(i), top));
            store(at + 4 * i, chosen.indices[i] | code << 28);
        }
        return;
    }
    if (indices == IndexFormat::pairs) {
        std::copy_n(reinterpret_cast<const uint8_t*>(chosen.indices), 4 * chosen.count, at);
        at += 4 * chosen.count;
    } else if (indices == IndexFormat::runs) {
        for_each_run(chosen.indices, chosen.count, [&at](uint16_t entry) {
            store(at, entry);
            at += 2;
        });
    } else {
        const size_t nbytes = (chosen.n + 7) / 8;
        std::fill_n(at, nbytes, uint8_t(0));
        for (size_t i = 0; i < chosen.count; ++i) at[chosen.indices[i] / 8] |= static_cast<uint8_t>(1 << chosen.indices[i] % 8);
        at += nbytes;
    }
    if (values == ValueFormat::full) {
        for (size_t i = 0; i < chosen.count; ++i) store(at + i * sizeof(T), value(i));
        return;
    }
    std::fill_n(at, values_nbytes<T>(chosen.count, values), uint8_t(0));
    for (size_t i = 0; i < chosen.count; ++i) {
        if (values == ValueFormat::sign) at[i / 8] |= static_cast<uint8_t>((value(i) < 0) << i % 8);
        else at[i / 2] |= static_cast<uint8_t>(power_code(value(i), top) << i % 2 * 4);
    }
}

template <class T>
const char* read_header(const uint8_t* wire, size_t nbytes, uint64_t n, SparseHeader& header) {
    if (nbytes < sparse_header_nbytes) return "it is shorter than its header";
    if (wire[0] > 3 || wire[1] > 2 || wire[2] != sizeof(T) || wire[3] != 0) return "its formats are unknown, or for values of another size";
    header.indices = static_cast<IndexFormat>(wire[0]);
    header.values = static_cast<ValueFormat>(wire[1]);
    header.top = load<int32_t>(wire + 4);
    header.step = load<double>(wire + 8);
    if (load<uint64_t>(wire + 16) != n) return "it is of a buffer of another length";
    const uint64_t count = load<uint64_t>(wire + 24);
    if (count > n || n > most_sparse_elements)  // otherwise the size of 2^62 elements would wrap to 0
        return "it has more elements than the buffer";
    header.count = count;
    const bool packed = header.indices == IndexFormat::packed;
    if (packed && (header.values != ValueFormat::power || n > most_packed_elements)) return "its formats do not go together";
    const int infinite = static_cast<int>(infinity_bits<T> >> FloatFormat<T>::fraction_bits);
    if (header.values == ValueFormat::power && (header.top < 0 || header.top >= infinite)) return "its exponent is out of range";
    const size_t body = nbytes - sparse_header_nbytes;
    const size_t for_values = packed ? 0 : values_nbytes<T>(count, header.values);
    if (body < for_values) return "it is shorter than its values";
    const size_t for_indices = body - for_values;
    switch (header.indices) {
        case IndexFormat::pairs:
        case IndexFormat::packed: return for_indices == 4 * count ? nullptr : "its length is not that of its elements";
        case IndexFormat::mask: return for_indices == (n + 7) / 8 ? nullptr : "its length is not that of its mask";
        case IndexFormat::runs: return for_indices % 2 == 0 && for_indices / 2 >= count ? nullptr : "its length is not that of its runs";
    }
    return "its index format is unknown";
}

template <class T>
const char* read_sparse(
    const uint8_t* wire, size_t nbytes, uint64_t n, const SparseHeader& header, uint32_t* indices, T* values) {
    const uint8_t* at = wire + sparse_header_nbytes;
    const size_t count = header.count;
    if (header.indices == IndexFormat::packed) {
        for (size_t i = 0; i < count; ++i) {
            const auto word = load<uint32_t>(at + 4 * i);
            indices[i] = word & index_mask;
            values[i] = power_value<T>(static_cast<int>(word >> 28), header.top);
        }
    } else if (header.indices == IndexFormat::pairs) {
        std::copy_n(at, 4 * count, reinterpret_cast<uint8_t*>(indices));
        at += 4 * count;
    } else if (header.indices == IndexFormat::mask) {
        size_t found = 0;
        for (uint64_t byte = 0; byte < (n + 7) / 8; ++byte)
            for (unsigned bits = at[byte]; bits != 0; bits &= bits - 1) {
                if (found == count) return "its mask has more bits than elements";
                indices[found++] = static_cast<uint32_t>(8 * byte + static_cast<unsigned>(__builtin_ctz(bits)));
            }
        if (found != count) return "its mask has fewer bits than elements";
        at += (n + 7) / 8;
    } else {
        const uint8_t* const end = wire + nbytes - values_nbytes<T>(count, header.values);
        uint64_t next = 0;
        size_t found = 0;
        for (; at < end; at += 2) {
            const auto gap = load<uint16_t>(at);
            next += gap;
            if (gap == longest_gap) continue;
            if (found == count || next >= n) return "its runs have other elements than it says";
            indices[found++] = static_cast<uint32_t>(next++);
        }
        if (found != count) return "its runs have fewer elements than it says";
    }
    for (size_t i = 0; i < count; ++i)
        if (indices[i] >= n || (i > 0 && indices[i] <= indices[i - 1])) return "its indices are out of order or too large";
    if (header.indices == IndexFormat::packed) return nullptr;
    for (size_t i = 0; i < count; ++i) {
        if (header.values == ValueFormat::full) values[i] = load<T>(at + i * sizeof(T));
        else if (header.values == ValueFormat::sign) values[i] = static_cast<T>((at[i / 8] >> i % 8 & 1) != 0 ? -header.step : header.step);
        else values[i] = power_value<T>(at[i / 2] >> i % 2 * 4 & 15, header.top);
    }
    return nullptr;
}

template <class T>
T kth_largest(const T* values, size_t n, size_t k) {
    std::vector<SignedOf<T>> magnitudes(n);
    for (size_t i = 0; i < n; ++i) magnitudes[i] = magnitude_bits(load<T>(values + i));
    const auto nth = magnitudes.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(magnitudes.begin(), nth, magnitudes.end(), std::greater<>());
    return bits_as<T>(*nth);
}

template <class T>
size_t largest(const T* values, size_t n, size_t k, uint32_t* positions) {
    SignedOf<T> least = 1;  // smallest magnitude chosen, never 0
    size_t equal = n;  // how many of the magnitudes equal to it are chosen
    if (k < n) {
        if (k == 0) least = infinity_bits<T>;
        else {
            const auto kth = magnitude_bits(kth_largest(values, n, k));
            if (kth >= infinity_bits<T>) least = infinity_bits<T>;
            else if (kth > 0) {
                least = kth;
                equal = k;
                for (size_t i = 0; i < n; ++i) equal -= magnitude_bits(load<T>(values + i)) > kth;
            }
        }
    }
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto magnitude = magnitude_bits(load<T>(values + i));
        if (magnitude < least || (magnitude == least && equal == 0)) continue;
        equal -= magnitude == least;
        positions[count++] = static_cast<uint32_t>(i);
    }
    return count;
}

template <class T>
void sample(const T* values, size_t n, T* sampled, size_t m) {
    const size_t runs = m / sample_run;
    for (size_t i = 0; i < runs; ++i) std::copy_n(values + sample_begin(n, runs, i), sample_run, sampled + i * sample_run);
}

#define COMPCOLL_FOR(T)                                                                                              \
    template size_t sparse_nbytes(const Chosen<T>&, IndexFormat, ValueFormat);                                       \
    template void write_sparse(const Chosen<T>&, IndexFormat, ValueFormat, double, int, uint8_t*);                   \
    template const char* read_header<T>(const uint8_t*, size_t, uint64_t, SparseHeader&);                            \
    template const char* read_sparse(const uint8_t*, size_t, uint64_t, const SparseHeader&, uint32_t*, T*);          \
    template T kth_largest(const T*, size_t, size_t);                                                                \
    template size_t largest(const T*, size_t, size_t, uint32_t*);                                                    \
    template void sample(const T*, size_t, T*, size_t);
COMPCOLL_FOR(float)
COMPCOLL_FOR(double)

}  // namespace compcoll
