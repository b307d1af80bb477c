// ZFP's embedded coding by table, for CPUs and GPUs: a block's bit planes as one string of bits, to and from its code.
//
// The *string* of a block is its planes from the most significant one, four bits per plane, sixteen planes per word. Its code is
// computed in steps: leading empty planes are one 0 each, counted at once; then a table encodes two planes (or decodes eight bits of
// code) per step; once the third coefficient is significant, code and string are the same bits. The tables are made from encode_plane
// and decode_plane, so the code is defined in one place.
#pragma once

#include "zfp.h"

namespace compcoll {

COMPCOLL_HD constexpr uint64_t low_bits(int count) { return count >= 64 ? ~uint64_t(0) : count > 0 ? (uint64_t(1) << count) - 1 : 0; }

// The fields of a table entry stay separate when two entries are added. `significant` is at its position in the next index; three
// and four coefficients have the same code.
constexpr uint32_t significant_mask = 3 << 8;
constexpr uint32_t all_significant = significant_mask;

COMPCOLL_HD constexpr uint32_t entry_of(uint32_t bits, int length, int significant, int planes) {
    return bits << 16 | uint32_t(planes) << 12 | uint32_t(significant < 3 ? significant : 3) << 8 | uint32_t(length);
}
COMPCOLL_HD constexpr int length_in(uint32_t entry) { return int(entry & 63); }             // bits of code
COMPCOLL_HD constexpr int string_bits_in(uint32_t entry) { return int(entry >> 10 & 60); }  // bits of string, four per plane
COMPCOLL_HD constexpr uint32_t bits_in(uint32_t entry) { return entry >> 16; }

struct Table {
    uint32_t entry[4 * 256];
};

COMPCOLL_HD constexpr Table make_encode_table() {
    Table table{};
    for (uint32_t index = 0; index < 4 * 256; ++index) {
        const zfp::Plane first = zfp::encode_plane(index & 15, int(index >> 8));
        const zfp::Plane second = zfp::encode_plane(index >> 4 & 15, first.significant);
        table.entry[index] = entry_of(first.bits | second.bits << first.length, first.length + second.length,
                                      second.significant, 2);
    }
    return table;
}

// As many whole planes as eight bits of code hold, at most four. The longest code of a plane has seven bits.
COMPCOLL_HD constexpr Table make_decode_table() {
    Table table{};
    for (uint32_t index = 0; index < 4 * 256; ++index) {
        uint32_t string = 0;
        int length = 0, significant = int(index >> 8), planes = 0;
        while (planes < 4) {
            const zfp::Plane plane = zfp::decode_plane((index & 255) >> length, significant, 64);
            if (length + plane.length > 8) break;
            string |= plane.bits << 4 * planes++;
            length += plane.length, significant = plane.significant;
        }
        table.entry[index] = entry_of(string, length, significant, planes);
    }
    return table;
}

// The largest of the four fixed-point values has its top bit set, and the transform shrinks it to no less than a quarter. So at
// most four leading planes of a block are empty. Codes of other encoders may have more; the decoders below leave those to
// decode_block.
constexpr int most_empty_planes = 7;

COMPCOLL_HD int empty_planes(uint64_t code) { return trailing_zeros(code | uint64_t(1) << 63); }

// The most planes that a code of `bits` bits can hold: empty planes take one bit each, all others at least two.
COMPCOLL_HD constexpr int most_planes(int bits) { return most_empty_planes + 1 + (bits - most_empty_planes) / 2; }

// If the budget ended a search, zeros were read for the missing bits, so that the one bit was found in the last place. Move it to
// where the search stopped. `over` is the number of missing bits read (if it is not positive, nothing changes), `done` the length
// of the string.
COMPCOLL_HD void cut_search(uint64_t& low, uint64_t& high, int done, int over) {
    uint64_t& last = high != 0 ? high : low;
    const int top = 63 - leading_zeros(last | 1), plane = (top + (high != 0 ? 64 : 0)) / 4;
    const int missing = over - (done - 4 - 4 * plane);  // planes after the last one bit have four bits of code
    const uint64_t moved = uint64_t(1) << top ^ uint64_t(1) << ((top - missing) & 63);
    last ^= moved & (0 - uint64_t((top % 4 == 3) & (missing > 0)));
}

// --- sixteen planes of four coefficients are a 4 × 16 bit matrix, transposed top plane first ---------------------------------
// A bit's address in the word has six binary digits. Exchanging two digits moves bits by a constant distance. To get from address
// (coefficient, bit) to (15 - bit, coefficient) takes four exchanges, each of which also complements both digits.

template <class Word>
COMPCOLL_HD Word exchange(Word x, int distance, Word mask) {
    const Word difference = (x >> distance ^ x) & mask;
    return x ^ difference ^ difference << distance;
}

COMPCOLL_HD uint64_t planes_first(uint64_t x) {
    x = exchange<uint64_t>(x, 40, 0x0000000000ff00ff);  // digits 5 and 3
    x = exchange<uint64_t>(x, 10, 0x0033003300330033);  // digits 3 and 1
    x = exchange<uint64_t>(x, 20, 0x00000f0f00000f0f);  // digits 4 and 2
    return exchange<uint64_t>(x, 5, 0x0505050505050505);  // digits 2 and 0
}

COMPCOLL_HD uint64_t coefficients_first(uint64_t x) {
    x = exchange<uint64_t>(x, 5, 0x0505050505050505);
    x = exchange<uint64_t>(x, 20, 0x00000f0f00000f0f);
    x = exchange<uint64_t>(x, 10, 0x0033003300330033);
    return exchange<uint64_t>(x, 40, 0x0000000000ff00ff);
}
}  // namespace compcoll
