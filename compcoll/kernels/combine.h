// Sums of decoded wires and one array, encoded again or stored: the only two loops over a buffer that the library has.
#pragma once

#include <vector>

#include "tile.h"

namespace compcoll {

struct Coder {
    Codec codec;
    Config config;
    const Kernels* kernels;  // the codec's, for the instruction set in use
    const Kernels* casts;    // the cast codec's: loads and stores half precision
    const Sums* sums;
};

// add · scale + D(wires[0]) + D(wires[1]) + …, in this order; `add` may be null.
struct Terms {
    const uint8_t* add;
    double scale;
    std::vector<const uint8_t*> wires;
};

// Bytes of the wire of n values whose computing type has `value_size` bytes.
size_t wire_nbytes(Codec codec, Config config, size_t n, size_t value_size);

// What an encoding loses, kept for a later call: float64 values for float64, else float32. With `feed`, what it holds is
// added to the values and replaced by the new loss; otherwise the new loss is added to it.
struct Residual {
    uint8_t* values;  // null: nothing is kept
    bool feed;
    double scale;     // of the loss that is stored
};

// Which random numbers an encoding takes, if any: the number of the draw, and where in the whole buffer the values begin.
struct RngPosition {
    uint64_t number;
    uint64_t position;
};

// wire = E(terms [+ residual]);  decoded, unless null, = D(wire).
void encode(const Coder& coder, Storage storage, size_t n, const Terms& terms, Residual residual, RngPosition rng_counter, uint8_t* wire,
            uint8_t* decoded, int threads);

// Whether encoding knows what others will decode: `decoded` then costs less than a decoding.
bool knows_decoded(const Coder& coder, Storage storage);

// out = terms
void decode(const Coder& coder, Storage storage, size_t n, const Terms& terms, uint8_t* out, int threads);

}  // namespace compcoll
