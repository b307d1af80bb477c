// A codec configuration for one element type, as the host backend calls it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <vector>

#include "combine.h"

namespace compcoll {

using Readable = nanobind::ndarray<nanobind::ro, nanobind::c_contig, nanobind::device::cpu>;
using Writable = nanobind::ndarray<nanobind::c_contig, nanobind::device::cpu>;

class HostCoder {
public:
    HostCoder(const std::string& codec, int first, int second, int variant, uint64_t seed, int storage, int instruction_set);

    const Coder& coder() const { return coder_; }
    Storage storage() const { return storage_; }
    bool knows_decoded() const { return compcoll::knows_decoded(coder_, storage_); }
    size_t value_size() const { return storage_ == Storage::float64 ? 8 : 4; }
    size_t wire_nbytes(size_t n) const { return compcoll::wire_nbytes(coder_.codec, coder_.config, n, value_size()); }

    void encode(size_t n, std::optional<Readable> add, double add_scale, const std::vector<Readable>& wires,
                std::optional<Writable> residual, bool feed, double residual_scale, uint64_t rng_counter, uint64_t position,
                Writable wire, std::optional<Writable> decoded, int threads) const;
    void decode(size_t n, std::optional<Readable> add, double add_scale, const std::vector<Readable>& wires, Writable out,
                int threads) const;

private:
    void check_config(const Config& config) const;
    Terms checked(size_t n, const std::optional<Readable>& add, double add_scale, const std::vector<Readable>& wires) const;

    Storage storage_;
    Coder coder_;
};

void bind_host_coder(nanobind::module_& m);

}  // namespace compcoll
