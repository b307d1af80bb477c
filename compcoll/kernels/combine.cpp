#include "combine.h"

#include <algorithm>

#include "team.h"
#include "unaligned.h"

namespace compcoll {

namespace {

constexpr size_t tile_nbytes = 4096;              // small, so that decoding a tile overlaps encoding the previous one
constexpr size_t feedback_tile_nbytes = 2048;     // smaller, because feedback makes many passes over a tile
constexpr size_t piece = 256;                     // values: few enough cache lines to prefetch all at once
constexpr size_t pieces_of_all = 64;              // pieces of a buffer that threads share, within the limits below
constexpr size_t shortest_piece_nbytes = 65536;   // a shorter piece is not worth handing to a thread
constexpr size_t longest_piece_nbytes = 1 << 19;  // a longer piece makes the caller wait too long for a helper

template <class T>
constexpr Storage storage_of = sizeof(T) == 8 ? Storage::float64 : Storage::float32;

template <class T>
size_t tile_length(const Coder& coder, size_t nbytes) {
    const size_t length = nbytes / sizeof(T);
    if (coder.codec == Codec::cast || coder.codec == Codec::zfp) return length;
    const size_t block = static_cast<size_t>(coder.config.second);
    return std::max(block, length / block * block);
}

// The loop state of one tile: the positions of its values and wires.
template <class T>
class Tile {
public:
    Tile(const Coder& coder, Storage storage, const Terms& terms, size_t begin, size_t n)
        : coder_(coder), code_(coder.kernels->of<T>()), cast_(coder.casts->of<T>()), sums_(coder.sums->of<T>()), storage_(storage),
          terms_(terms), begin_(begin), n_(n), offset_(wire_nbytes(coder.codec, coder.config, begin, sizeof(T))) {}

    bool stored_as_computed() const { return storage_ == storage_of<T>; }

    const uint8_t* array_at(const uint8_t* array) const { return array + begin_ * storage_size(storage_); }
    uint8_t* array_at(uint8_t* array) const { return array + begin_ * storage_size(storage_); }

    void load(const uint8_t* array, T* values) const {
        cast_.decode(array_at(array), n_, values, values, Config{static_cast<int>(storage_)});
    }

    void store(const T* values, uint8_t* array) const {
        cast_.encode(values, n_, array_at(array), Config{static_cast<int>(storage_)});
    }

    void sum_terms(T* values) const {
        if (terms_.add == nullptr) {
            code_.decode(terms_.wires[0] + offset_, n_, values, values, coder_.config);
            add_wires(1, values, values);
        } else if (stored_as_computed() && terms_.scale == 1.0 && !terms_.wires.empty()) {
            add_wires(0, reinterpret_cast<const T*>(array_at(terms_.add)), values);
        } else {
            load(terms_.add, values);
            multiply(values, terms_.scale);
            add_wires(0, values, values);
        }
    }

    void add_wires(size_t first, const T* base, T* values) const {
        for (size_t i = first; i < terms_.wires.size(); ++i) {
            code_.decode_add(terms_.wires[i] + offset_, n_, base, values, coder_.config);
            base = values;
        }
    }

    // Unless `decoded` is null, it gets the values that the other ranks will decode.
    void encode(const T* values, uint8_t* wire, RngPosition rng_counter, T* decoded) const {
        Config config = coder_.config;
        config.rng_counter = rng_counter.number;
        config.position = rng_counter.position + begin_;
        if (decoded != nullptr && knows_decoded(coder_, storage_)) {
            code_.encode_decoded(values, n_, wire + offset_, decoded, config);
        } else {
            code_.encode(values, n_, wire + offset_, config);
            if (decoded != nullptr) code_.decode(wire + offset_, n_, decoded, decoded, config);
        }
    }

    void multiply(T* values, double scale) const {
        if (static_cast<T>(scale) != T(1)) sums_.multiply(values, n_, static_cast<T>(scale));
    }

    // Add the terms to the residual.
    void add_terms(T* kept, T* scratch) const {
        if (stored_as_computed() && terms_.scale == 1.0 && terms_.wires.empty()) {
            const T* array = reinterpret_cast<const T*>(array_at(terms_.add));
            in_pieces(array, [&](size_t i, size_t n) { sums_.add(array + i, kept + i, n, kept + i); });
        } else {
            sum_terms(scratch);
            sums_.add(scratch, kept, n_, kept);
        }
    }

    void keep_loss(const T* wanted, const T* got, T* kept, const Residual& residual) const {
        const auto scale = static_cast<T>(residual.scale);
        in_pieces(kept, [&](size_t i, size_t n) { sums_.keep_loss(wanted + i, got + i, n, scale, residual.feed, kept + i); });
    }

private:
    // Process a tile in pieces, and prefetch the next tile of the array meanwhile: only the first of feedback's passes reads main
    // memory, which would be idle during the rest.
    template <class Body>
    void in_pieces(const T* array, Body body) const {
        for (size_t i = 0, n; i < n_; i += n) {
            n = std::min(piece, n_ - i);
            prefetch(array + i, n_, n);
            body(i, n);
        }
    }

    const Coder& coder_;
    const TileFunctions<T>& code_;
    const TileFunctions<T>& cast_;
    const SumFunctions<T>& sums_;
    Storage storage_;
    const Terms& terms_;
    size_t begin_, n_, offset_;
};

// Call body(begin, length, scratch) for each tile.
template <class T, class Body>
void for_each_tile(size_t length, size_t n, int threads, Body body) {
    const auto run = [&](size_t first, size_t end) {
        thread_local std::vector<T> scratch;
        if (scratch.size() < 2 * length) scratch.resize(2 * length);  // kept between calls, because growing it again would write zeros again
        for (size_t begin = first; begin < end; begin += length) body(begin, std::min(length, end - begin), scratch.data());
    };
    const int team = team_size(n * sizeof(T), threads);
    if (team == 1) return run(0, n);
    const size_t wanted = std::clamp(n * sizeof(T) / pieces_of_all, shortest_piece_nbytes, longest_piece_nbytes);
    const size_t each = std::max(wanted / sizeof(T) / length, n / length / most_pieces + 1) * length;
    const auto work = [&](size_t piece) { run(piece * each, std::min(n, (piece + 1) * each)); };
    in_pieces((n + each - 1) / each, team, PieceWork(work));
}

template <class T>
void encode_as(const Coder& coder, Storage storage, size_t n, const Terms& terms, Residual residual, RngPosition rng_counter,
               uint8_t* wire, uint8_t* decoded, int threads) {
    T* kept = reinterpret_cast<T*>(residual.values);
    const bool as_it_is = terms.wires.empty() && kept == nullptr && terms.scale == 1.0 && storage == storage_of<T>;
    const bool at_once = decoded == nullptr || knows_decoded(coder, storage);
    const bool one_pass = as_it_is && at_once;  // longer tiles then make fewer calls
    const size_t nbytes = one_pass ? 16 * tile_nbytes : kept != nullptr ? feedback_tile_nbytes : tile_nbytes;
    const size_t length = tile_length<T>(coder, nbytes);
    for_each_tile<T>(length, n, threads, [&](size_t begin, size_t m, T* scratch) {
        const Tile<T> tile(coder, storage, terms, begin, m);
        // With feedback, the sum and at the end the new residual are stored in place: that memory is written anyway.
        T* values = kept != nullptr && residual.feed ? kept + begin : scratch;
        const bool in_place = decoded != nullptr && tile.stored_as_computed();
        T* got = in_place ? reinterpret_cast<T*>(tile.array_at(decoded)) : scratch + length;
        if (kept == nullptr && decoded == nullptr) got = nullptr;
        if (as_it_is) {
            tile.encode(reinterpret_cast<const T*>(tile.array_at(terms.add)), wire, rng_counter, got);
        } else {
            if (values != scratch) tile.add_terms(values, scratch);
            else tile.sum_terms(values);
            tile.encode(values, wire, rng_counter, got);
        }
        if (kept != nullptr) tile.keep_loss(values, got, kept + begin, residual);
        if (decoded != nullptr && !in_place) tile.store(got, decoded);
    });
}

template <class T>
void decode_as(const Coder& coder, Storage storage, size_t n, const Terms& terms, uint8_t* out, int threads) {
    const bool one_wire = terms.wires.size() == 1 && terms.scale == 1.0 && storage == storage_of<T>;
    for_each_tile<T>(tile_length<T>(coder, (one_wire ? 16 : 1) * tile_nbytes), n, threads, [&](size_t begin, size_t m, T* scratch) {
        const Tile<T> tile(coder, storage, terms, begin, m);
        if (!tile.stored_as_computed()) {
            tile.sum_terms(scratch);
            tile.store(scratch, out);
            return;
        }
        T* values = reinterpret_cast<T*>(tile.array_at(out));
        tile.sum_terms(values);
    });
}

}  // namespace

size_t wire_nbytes(Codec codec, Config config, size_t n, size_t value_size) {
    const size_t first = static_cast<size_t>(config.first), block = static_cast<size_t>(config.second);
    // The size of blocks of a header and packed codes; the last block may be shorter.
    const auto blocks = [=](size_t header, size_t bits) {
        const size_t rest = n % block;
        return n / block * (header + block * bits / 8) + (rest ? header + (rest * bits + 7) / 8 : 0);
    };
    switch (codec) {
        case Codec::cast: return n * storage_size(static_cast<Storage>(config.first));
        case Codec::zfp: return ((n + 3) / 4 * first + 63) / 64 * 8;
#define COMPCOLL_NBYTES(codec, name, least, largest, variant, header, bits) case Codec::codec: return blocks(header, bits);
        COMPCOLL_EACH_BLOCK_CODEC(COMPCOLL_NBYTES)
#undef COMPCOLL_NBYTES
    }
    return 0;
}

bool knows_decoded(const Coder& coder, Storage storage) {
    const int knows_up_to = storage == Storage::float64 ? coder.kernels->f64.knows_up_to : coder.kernels->f32.knows_up_to;
    return coder.config.first <= knows_up_to;
}

void encode(const Coder& coder, Storage storage, size_t n, const Terms& terms, Residual residual, RngPosition rng_counter, uint8_t* wire,
            uint8_t* decoded, int threads) {
    if (storage == Storage::float64)
        encode_as<double>(coder, storage, n, terms, residual, rng_counter, wire, decoded, threads);
    else
        encode_as<float>(coder, storage, n, terms, residual, rng_counter, wire, decoded, threads);
}

void decode(const Coder& coder, Storage storage, size_t n, const Terms& terms, uint8_t* out, int threads) {
    if (storage == Storage::float64) decode_as<double>(coder, storage, n, terms, out, threads);
    else decode_as<float>(coder, storage, n, terms, out, threads);
}

}  // namespace compcoll
