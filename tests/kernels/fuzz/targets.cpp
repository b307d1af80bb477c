#include "targets.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "combine.h"
#include "crc32c.h"
#include "instruction_sets.h"
#include "sparse_wire.h"

using namespace compcoll;

const char* target_name(int target) {
    static constexpr const char* others[] = {"sparse32", "sparse64", "intsum", "votes"};
    return target < codec_count ? codec_names[target] : others[target - codec_count];
}

namespace {

// Those after the codecs.
enum Target : uint8_t { sparse32 = codec_count, sparse64, intsum, votes };

void promise(bool kept, const char* what) {
    if (kept) return;
    std::fprintf(stderr, "a promise is broken: %s\n", what);
    std::abort();
}

// Memory of exactly so many bytes, between the sanitizer's red zones.
class Memory {
public:
    explicit Memory(size_t nbytes) : nbytes_(nbytes), bytes_(new uint8_t[nbytes]) { std::fill_n(bytes_.get(), nbytes, 0xa5); }
    Memory(const uint8_t* from, size_t given, size_t nbytes) : Memory(nbytes) {
        const size_t kept = std::min(given, nbytes);
        std::copy_n(from, kept, bytes_.get());
        std::fill_n(bytes_.get() + kept, nbytes - kept, 0);
    }
    uint8_t* data() const { return bytes_.get(); }
    size_t size() const { return nbytes_; }

private:
    size_t nbytes_;
    std::unique_ptr<uint8_t[]> bytes_;
};

// The first bytes of an input.
struct Header {
    uint8_t target, first, block, variant, ways;
    Storage storage;
    uint32_t n;

    explicit Header(const Bytes& input) {
        const auto at = [&](size_t i) { return i < input.size() ? input[i] : uint8_t(0); };
        target = at(0) % target_count;
        static constexpr Storage storages[] = {Storage::float16, Storage::bfloat16, Storage::float32, Storage::float64};
        storage = storages[at(1) % 4];
        first = at(2);
        block = at(3);
        variant = at(4);
        ways = at(5);
        // Mostly a few blocks of the smaller sizes; beyond, whole groups of blocks, and several tiles.
        n = (at(6) | at(7) << 8) % (at(8) == 0 ? (at(9) < 8 ? 40000 : 3000) : at(8) < 64 ? 600 : 100);
    }

    bool wide() const { return storage == Storage::float64; }

    int block_values() const {
        static constexpr int blocks[] = {8, 16, 24, 40, 64, 128, 512, 1024, 2048, 4096};
        return blocks[block % std::size(blocks)];
    }

    Config config() const {
        Config config;
        const auto codec = static_cast<Codec>(target);
        config.second = fixed_block(codec) != 0 ? fixed_block(codec) : block_values();
        const Range range = range_of_first(codec, wide());
        config.variant = variant % (largest_variant(codec) + 1);
        config.first = range.least + first % (range.largest - range.least + 1);
        if (codec == Codec::cast) {
            static constexpr int wires[] = {11, 8, 24, 53};
            config.first = wires[first % (wide() ? 4 : 3)];
        }
        return config;
    }
};

Coder coder_of(const Header& header, InstructionSet set) {
    const auto codec = static_cast<Codec>(header.target);
    return {codec, header.config(), &kernels_of(codec, set), &kernels_of(Codec::cast, set), &sums_of(set)};
}

size_t wire_nbytes_of(const Header& header) {
    return wire_nbytes(static_cast<Codec>(header.target), header.config(), header.n, header.wide() ? 8 : 4);
}

// The same values, where NaNs are alike.
template <class T>
bool same_values(const uint8_t* a, const uint8_t* b, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        T x, y;
        std::memcpy(&x, a + i * sizeof(T), sizeof(T));
        std::memcpy(&y, b + i * sizeof(T), sizeof(T));
        if (std::memcmp(&x, &y, sizeof(T)) != 0 && !(std::isnan(x) && std::isnan(y))) return false;
    }
    return true;
}

bool same_halves(const uint8_t* a, const uint8_t* b, size_t n, unsigned infinity) {
    for (size_t i = 0; i < 2 * n; i += 2) {
        const unsigned x = a[i] | a[i + 1] << 8, y = b[i] | b[i + 1] << 8;
        if (x != y && !((x & 0x7fff) > infinity && (y & 0x7fff) > infinity)) return false;
    }
    return true;
}

bool same(Storage storage, const Memory& a, const Memory& b, size_t n) {
    switch (storage) {
        case Storage::float16: return same_halves(a.data(), b.data(), n, 0x7c00);
        case Storage::bfloat16: return same_halves(a.data(), b.data(), n, 0x7f80);
        case Storage::float32: return same_values<float>(a.data(), b.data(), n);
        case Storage::float64: return same_values<double>(a.data(), b.data(), n);
    }
    return false;
}

// Decodes one or two wires, with or without values to add, in place or not, scaled or not; then encodes the same sum
// again, as a rank does that passes it on. One input in eight goes through all instruction sets, which give the same.
void decode_dense(const Header& header, const uint8_t* body, size_t body_nbytes) {
    const auto storage = header.storage;
    const size_t n = header.n, values_nbytes = n * storage_size(storage), nbytes = wire_nbytes_of(header);
    const Memory wire(body, body_nbytes, nbytes);
    const size_t begin = std::min(body_nbytes, nbytes);
    const Memory other(body + begin, body_nbytes - begin, nbytes), values(body, body_nbytes, values_nbytes);
    const bool add = header.ways & 1, in_place = header.ways & 2, two = header.ways & 4, recode = header.ways & 16;
    Terms terms{nullptr, header.ways & 8 ? 0.25 : 1.0, {wire.data()}};
    if (two) terms.wires.push_back(other.data());
    std::vector<Memory> outs, wires;
    const bool every_set = header.ways >> 5 == 0;
    for (const auto& [name, set] : all_sets) {
        if (!supported(set) || (!every_set && (header.ways >> 5) % 3 != static_cast<int>(set))) continue;
        const Coder coder = coder_of(header, set);
        Memory out(values.data(), values_nbytes, values_nbytes);
        terms.add = !add ? nullptr : in_place ? out.data() : values.data();
        decode(coder, storage, n, terms, out.data(), 1);
        outs.push_back(std::move(out));
        promise(same(storage, outs.front(), outs.back(), n), "instruction sets decode differently");
        if (!recode) continue;
        Memory again(nbytes), decoded(values_nbytes);
        terms.add = add ? values.data() : nullptr;
        encode(coder, storage, n, terms, Residual{nullptr, false, 1.0}, RngPosition{3, 0}, again.data(), decoded.data(), 1);
        Memory read(values_nbytes);
        decode(coder, storage, n, Terms{nullptr, 1.0, {again.data()}}, read.data(), 1);
        promise(same(storage, decoded, read, n), "an encoder's own wire decodes to something else than it said");
    }
}

// Values as numbers that MPI has added: levels of a step, or votes, and each block's largest magnitude.
template <class T>
struct IntegerQuantizer {
    using Bits = BitsOf<T>;
    size_t n, block, blocks, numbers_nbytes;
    int nbytes, width;
    int32_t levels;
    uint32_t ranks;
    bool voting;

    explicit IntegerQuantizer(const Header& header)
        : n(header.n), block(static_cast<size_t>(header.block_values())), blocks((n + block - 1) / block),
          nbytes(1 << header.first % 3), width(2 << header.first % 5), ranks(1 + header.ways % (width == 2 ? 1 : 7)),
          voting(header.target == votes) {
        levels = static_cast<int32_t>(((int64_t(1) << (8 * nbytes - 1)) - 1) / ranks);
        const int spare = sizeof(T) == 8 ? 0 : std::max(static_cast<int>(std::bit_width(static_cast<uint32_t>(levels))) - 24, 0);
        levels = levels >> spare << spare;  // which a float holds, as gpu/quantizer.py asks for
        numbers_nbytes = voting ? (n * static_cast<size_t>(width) + 7) / 8 : n * static_cast<size_t>(nbytes);
    }
    static const IntegerQuantizerFunctions<T>& passes(InstructionSet set) { return integer_quantizer_of(set).of<T>(); }
    static Bits* bits(const Memory& largest) { return reinterpret_cast<Bits*>(largest.data()); }
    static T* values(const Memory& memory) { return reinterpret_cast<T*>(memory.data()); }

    void survey(InstructionSet set, const Memory& from, const Memory& largest) const {
        passes(set).survey(values(from), n, block, bits(largest));
    }
    // The numbers, and what they lose.
    void write(InstructionSet set, const Memory& from, const Memory& largest, const Memory& numbers, const Memory& lost) const {
        if (voting) passes(set).to_votes(values(from), n, width, numbers.data());
        else passes(set).to_levels(values(from), n, block, bits(largest), levels, nbytes, numbers.data(), values(lost));
    }
    void read(InstructionSet set, const Memory& numbers, const Memory& largest, const Memory& out) const {
        if (voting) passes(set).from_votes(numbers.data(), width, ranks, n, block, bits(largest), values(out));
        else passes(set).from_levels(numbers.data(), nbytes, n, block, bits(largest), levels, values(out));
    }
};

// All instruction sets read the same values, and write the same numbers of other ones.
template <class T>
void decode_summands(const Header& header, const uint8_t* body, size_t body_nbytes) {
    const IntegerQuantizer<T> integer_quantizer(header);
    const Memory numbers(body, body_nbytes, integer_quantizer.numbers_nbytes);
    const size_t begin = std::min(body_nbytes, integer_quantizer.numbers_nbytes);
    const Memory largest(body + begin, body_nbytes - begin, integer_quantizer.blocks * sizeof(T));
    const Memory values(body, body_nbytes, header.n * sizeof(T));
    std::vector<Memory> outs, all_numbers, all_lost;
    for (const auto& [name, set] : all_sets) {
        if (!supported(set)) continue;
        outs.emplace_back(header.n * sizeof(T));
        integer_quantizer.read(set, numbers, largest, outs.back());
        promise(same_values<T>(outs.front().data(), outs.back().data(), header.n), "instruction sets read numbers differently");
        all_numbers.emplace_back(integer_quantizer.numbers_nbytes);
        all_lost.emplace_back(header.n * sizeof(T));
        integer_quantizer.write(set, values, largest, all_numbers.back(), all_lost.back());
        promise(std::equal(all_numbers.front().data(), all_numbers.front().data() + integer_quantizer.numbers_nbytes, all_numbers.back().data()) &&
                    same_values<T>(all_lost.front().data(), all_lost.back().data(), header.n),
                "instruction sets write numbers differently");
    }
}

// As HostSelection.read does: the header, memory for as many elements as it tells of, the elements.
template <class T>
void decode_sparse(const Header& header, const uint8_t* body, size_t nbytes) {
    const Memory wire(body, nbytes, nbytes);
    SparseHeader told;
    if (read_header<T>(wire.data(), nbytes, header.n, told) != nullptr) return;
    promise(told.count <= header.n, "more elements than there are");
    std::unique_ptr<uint32_t[]> indices(new uint32_t[told.count]);
    std::unique_ptr<T[]> values(new T[told.count]);
    if (read_sparse<T>(wire.data(), nbytes, header.n, told, indices.get(), values.get()) != nullptr) return;
    for (size_t i = 0; i < told.count; ++i)
        promise(indices[i] < header.n && (i == 0 || indices[i] > indices[i - 1]), "indices out of order or range");
}

template <class T>
T random_value(std::mt19937_64& random) {
    const double value = std::normal_distribution<double>()(random);
    switch (random() % 64) {
        case 0: return T(0);
        case 1: return std::numeric_limits<T>::infinity();
        case 2: return std::numeric_limits<T>::quiet_NaN();
        case 3: return std::numeric_limits<T>::denorm_min();
        case 4: return std::numeric_limits<T>::max();
        case 5: return static_cast<T>(value * 1e-30);
        default: return static_cast<T>(value);
    }
}

template <class T>
Bytes random_values(size_t n, std::mt19937_64& random) {
    Bytes bytes(n * sizeof(T));
    const bool tame = random() % 2;
    for (size_t i = 0; i < n; ++i) {
        const T value = tame ? static_cast<T>(std::normal_distribution<double>()(random)) : random_value<T>(random);
        std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
    return bytes;
}

void append_dense(const Header& header, Bytes& input, std::mt19937_64& random) {
    const auto storage = header.storage;
    const Bytes values = header.wide() ? random_values<double>(header.n, random)
                                       : random_values<float>(header.n, random);  // halves take the first half of these
    Bytes wire(wire_nbytes_of(header));
    if (header.n > 0)
        encode(coder_of(header, InstructionSet::portable), storage, header.n, Terms{values.data(), 1.0, {}},
               Residual{nullptr, false, 1.0}, RngPosition{1, 0}, wire.data(), nullptr, 1);
    input.insert(input.end(), wire.begin(), wire.end());
}

template <class T>
void append_summands(const Header& header, Bytes& input, std::mt19937_64& random) {
    const IntegerQuantizer<T> integer_quantizer(header);
    const Bytes bytes = random_values<T>(header.n, random);
    const Memory from(bytes.data(), bytes.size(), bytes.size()), lost(bytes.size());
    const Memory numbers(integer_quantizer.numbers_nbytes), largest(integer_quantizer.blocks * sizeof(T));
    integer_quantizer.survey(InstructionSet::portable, from, largest);
    integer_quantizer.write(InstructionSet::portable, from, largest, numbers, lost);
    input.insert(input.end(), numbers.data(), numbers.data() + numbers.size());
    input.insert(input.end(), largest.data(), largest.data() + largest.size());
}

template <class T>
void append_sparse(const Header& header, Bytes& input, std::mt19937_64& random) {
    std::vector<T> values;
    std::vector<uint32_t> indices;
    const uint64_t density = 1 + random() % 64;
    constexpr int top = sizeof(T) == 8 ? 1023 : 127;
    for (uint32_t i = 0; i < header.n; ++i) {
        if (random() % density != 0) continue;
        indices.push_back(i);
        // Powers of two that every value format holds.
        values.push_back(std::ldexp(T(random() % 2 ? 1 : -1), -static_cast<int>(random() % 8)));
    }
    const auto format = static_cast<IndexFormat>(header.first % 4);
    const auto of_values = format == IndexFormat::packed ? ValueFormat::power : static_cast<ValueFormat>(header.block % 3);
    const Chosen<T> chosen{values.data(), indices.data(), indices.size(), header.n};
    Bytes wire(sparse_nbytes(chosen, format, of_values));
    write_sparse(chosen, format, of_values, 0.5, top, wire.data());
    input.insert(input.end(), wire.begin(), wire.end());
}

}  // namespace

Bytes written_by_encoder(int target, std::mt19937_64& random) {
    Bytes input(header_nbytes);
    for (auto& byte : input) byte = static_cast<uint8_t>(random());
    input[0] = static_cast<uint8_t>(target);
    const Header header(input);
    switch (target) {
        case sparse32: append_sparse<float>(header, input, random); break;
        case sparse64: append_sparse<double>(header, input, random); break;
        case intsum:
        case votes: header.wide() ? append_summands<double>(header, input, random) : append_summands<float>(header, input, random); break;
        default: append_dense(header, input, random);
    }
    return input;
}

void make_short(Bytes& input) {
    if (input.size() > 8) input[8] |= 64;
}

void decode_input(const Bytes& input) {
    const Header header(input);
    const size_t at = std::min(input.size(), header_nbytes);
    const uint8_t* body = input.data() + at;
    const size_t nbytes = input.size() - at;
    if (header.ways % 32 == 0) promise(crc32c(body, nbytes) == crc32c_portable(body, nbytes), "checksums differ");
    switch (header.target) {
        case sparse32: decode_sparse<float>(header, body, nbytes); break;
        case sparse64: decode_sparse<double>(header, body, nbytes); break;
        case intsum:
        case votes: header.wide() ? decode_summands<double>(header, body, nbytes) : decode_summands<float>(header, body, nbytes); break;
        default:
            if (header.n > 0) decode_dense(header, body, nbytes);
    }
}
