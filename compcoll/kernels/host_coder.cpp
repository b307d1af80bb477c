// compcoll.kernels._host.Coder: see host_coder.h. Kernels run without the GIL.
#include "host_coder.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "instruction_sets.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

int in_range(const char* what, int value, int low, int high) {
    if (value < low || value > high)
        throw nb::value_error((std::string(what) + " must be in [" + std::to_string(low) + ", " + std::to_string(high) +
                               "], not " + std::to_string(value)).c_str());
    return value;
}

void require(const char* what, size_t given, size_t needed) {
    if (given < needed)
        throw nb::value_error((std::string(what) + " has " + std::to_string(given) + " bytes, " +
                               std::to_string(needed) + " are needed").c_str());
}

Storage checked_storage(int significant_bits) {
    if (!is_storage(significant_bits))
        throw nb::value_error(("no element type has " + std::to_string(significant_bits) + " significant bits").c_str());
    return static_cast<Storage>(significant_bits);
}

Codec codec_named(const std::string& name) {
    for (int i = 0; i < codec_count; ++i)
        if (name == codec_names[i]) return static_cast<Codec>(i);
    throw nb::value_error(("no codec's kernels are called " + name).c_str());
}

}  // namespace

HostCoder::HostCoder(const std::string& codec, int first, int second, int variant, uint64_t seed, int storage,
                     int instruction_set)
    : storage_(checked_storage(storage)) {
    coder_.codec = codec_named(codec);
    coder_.config = Config{first, second, variant, seed};
    check_config(coder_.config);
    const InstructionSet set = checked_set(instruction_set);
    coder_.kernels = &kernels_of(coder_.codec, set);
    coder_.casts = &kernels_of(Codec::cast, set);
    coder_.sums = &sums_of(set);
}

void HostCoder::encode(size_t n, std::optional<Readable> add, double add_scale, const std::vector<Readable>& wires,
                       std::optional<Writable> residual, bool feed, double residual_scale, uint64_t rng_counter, uint64_t position,
                       Writable wire, std::optional<Writable> decoded, int threads) const {
    const Terms terms = checked(n, add, add_scale, wires);
    require("wire", wire.nbytes(), wire_nbytes(n));
    if (residual) require("residual", residual->nbytes(), n * value_size());
    if (decoded) require("decoded", decoded->nbytes(), n * storage_size(storage_));
    if (n == 0) return;
    const Residual kept{residual ? static_cast<uint8_t*>(residual->data()) : nullptr, feed, residual_scale};
    auto* decoded_bytes = decoded ? static_cast<uint8_t*>(decoded->data()) : nullptr;
    auto* wire_bytes = static_cast<uint8_t*>(wire.data());
    nb::gil_scoped_release released;
    compcoll::encode(coder_, storage_, n, terms, kept, RngPosition{rng_counter, position}, wire_bytes, decoded_bytes, threads);
}

void HostCoder::decode(size_t n, std::optional<Readable> add, double add_scale, const std::vector<Readable>& wires,
                       Writable out, int threads) const {
    const Terms terms = checked(n, add, add_scale, wires);
    require("out", out.nbytes(), n * storage_size(storage_));
    if (n == 0) return;
    auto* out_bytes = static_cast<uint8_t*>(out.data());
    nb::gil_scoped_release released;
    compcoll::decode(coder_, storage_, n, terms, out_bytes, threads);
}

void HostCoder::check_config(const Config& config) const {
    const Range range = range_of_first(coder_.codec, storage_ == Storage::float64);
    in_range(coder_.codec == Codec::zfp ? "bits per block" : "first", config.first, range.least, range.largest);
    in_range("variant", config.variant, 0, largest_variant(coder_.codec));
    if (coder_.codec == Codec::zfp) return;
    if (coder_.codec == Codec::cast) return void(checked_storage(config.first));
    if (const int fixed = fixed_block(coder_.codec); fixed != 0) return void(in_range("block", config.second, fixed, fixed));
    if (in_range("block", config.second, 8, 1 << 20) % 8 != 0) throw nb::value_error("block must be a multiple of 8");
}

Terms HostCoder::checked(size_t n, const std::optional<Readable>& add, double add_scale,
              const std::vector<Readable>& wires) const {
    if (!add && wires.empty()) throw nb::value_error("nothing to sum: give an array or a wire");
    Terms terms{nullptr, add_scale, {}};
    if (add) {
        require("array", add->nbytes(), n * storage_size(storage_));
        terms.add = static_cast<const uint8_t*>(add->data());
    }
    for (const auto& wire : wires) {
        require("wire", wire.nbytes(), wire_nbytes(n));
        terms.wires.push_back(static_cast<const uint8_t*>(wire.data()));
    }
    return terms;
}

void compcoll::bind_host_coder(nb::module_& m) {
    m.def("codecs", [] { return std::vector<std::string>(std::begin(codec_names), std::end(codec_names)); },
          "Names of the codecs that have kernels.");
    nb::class_<HostCoder>(m, "Coder")
        .def(nb::init<const std::string&, int, int, int, uint64_t, int, int>(), nb::arg("codec"), nb::arg("first"), nb::arg("second"),
             nb::arg("variant"), nb::arg("seed"), nb::arg("storage"), nb::arg("instruction_set"))
        .def_prop_ro("knows_decoded", &HostCoder::knows_decoded, "Whether encoding knows what others will decode.")
        .def("wire_nbytes", &HostCoder::wire_nbytes, nb::arg("n"))
        .def("encode", &HostCoder::encode, nb::arg("n"), nb::arg("add").none(), nb::arg("add_scale"), nb::arg("wires"),
             nb::arg("residual").none(), nb::arg("feed"), nb::arg("residual_scale"), nb::arg("rng_counter"), nb::arg("position"),
             nb::arg("wire"), nb::arg("decoded").none(), nb::arg("threads"))
        .def("decode", &HostCoder::decode, nb::arg("n"), nb::arg("add").none(), nb::arg("add_scale"), nb::arg("wires"),
             nb::arg("out"), nb::arg("threads"));
}
