// Sums of one array and decoded wires, encoded again or stored: the only two loops over a buffer in the library.
#pragma once

#include <vector>

#include "tile.h"

namespace compcoll {

struct Coder {
    Codec codec;
    Config config;
    const Kernels* kernels;  // of the codec, for the instruction set in use
    const Kernels* casts;    // of the cast codec, which loads and stores half precision
    const Sums* sums;
};

// The sum add · scale + D(wires[0]) + D(wires[1]) + …, in this order; `add` may be null.
struct Terms {
    const uint8_t* add;
    double scale;
    std::vector<const uint8_t*> wires;
};

// Return the size in bytes of the wire of n values; their computing type has `value_size` bytes.
size_t wire_nbytes(Codec codec, Config config, size_t n, size_t value_size);

// The residual of an encoding, kept for a later call: float64 values for float64, else float32. With `feed`, encoding adds the
// residual to the values and replaces it by the new one; otherwise the new residual is added to it.
struct Residual {
    uint8_t* values;  // null: no residual is kept
    bool feed;
    double scale;     // factor of what encoding loses, before it is stored
};

// The random numbers of an encoding, if it needs any: the rng counter, and the index of the first value in the whole buffer.
struct RngPosition {
    uint64_t number;
    uint64_t position;
};

// wire = E(terms [+ residual]);  decoded, unless null, = D(wire).
void encode(const Coder& coder, Storage storage, size_t n, const Terms& terms, Residual residual, RngPosition rng_counter, uint8_t* wire,
            uint8_t* decoded, int threads);

// Return whether the encoder computes the decoded values, too: `decoded` then costs less than decoding the wire.
bool knows_decoded(const Coder& coder, Storage storage);

// out = terms
void decode(const Coder& coder, Storage storage, size_t n, const Terms& terms, uint8_t* out, int threads);

}  // namespace compcoll
