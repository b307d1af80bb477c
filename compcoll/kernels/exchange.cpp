// compcoll.kernels._host.Exchange: see exchange.h.
#include "exchange.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "message.h"

namespace nb = nanobind;
using namespace compcoll;

// A message of a round, with its memory.
class Exchange::Letter : public Message {
public:
    Letter(nb::object message, nb::object memory) : Message(message) {
        if (!shared()) memory_.emplace(memory, PyBUF_WRITABLE);
    }

    uint8_t* at() const { return shared() ? shared()->content() : memory_->at(); }
    size_t nbytes() const { return shared() ? shared()->nbytes() : memory_->nbytes(); }

private:
    std::optional<Buffer> memory_;
};

struct Exchange::Round {
    explicit Round(const Given& given)
        : wire(std::get<2>(given)), arriving(std::get<0>(given), wire.attr("buffer")),
          sending(std::get<1>(given), std::get<3>(given)), length(std::get<4>(given)), nbytes(std::get<5>(given)),
          to(std::get<6>(given)), before(std::get<7>(given)) {}

    nb::object wire;  // of the receive, for the number of bytes received
    Letter arriving, sending;
    size_t length, nbytes, to;
    bool before;
};

Exchange::Exchange(nb::handle arrays, const std::vector<Given>& rounds) : arrays_(arrays, PyBUF_WRITABLE) {
    for (const Given& given : rounds) {
        rounds_.push_back(std::make_unique<Round>(given));
        const Round& round = *rounds_.back();
        const size_t message = begin_nbytes + round.nbytes;
        if (message > round.length || round.to + round.nbytes > arrays_.nbytes() || message > round.arriving.nbytes() || message > round.sending.nbytes())
            throw nb::value_error("an exchange's arrays or messages are too short");
    }
}

Exchange::~Exchange() = default;

void Exchange::begin(const nb::bytes& extremes, nb::object piggyback) {
    if (extremes.size() != extremes_.size()) throw nb::value_error("16 bytes of extremes are needed");
    std::memcpy(extremes_.data(), extremes.c_str(), extremes_.size());
    first_ = extremes_;
    round_ = 0;
    stage_ = Stage::begins;
    owner_ = piggyback;
    piggyback_ = piggyback.is_none() ? nullptr : &nb::cast<PiggybackReduction&>(piggyback);
}

bool Exchange::needs_python() const {
    return !std::all_of(rounds_.begin(), rounds_.end(),
                        [](const auto& round) { return round->arriving.without_python() && round->sending.without_python(); });
}

bool Exchange::advance(WaitPolicy& policy) {
    for (; round_ < rounds_.size(); ++round_) {
        const Round& round = *rounds_[round_];
        switch (stage_) {
        case Stage::begins:
            start(round);
            stage_ = Stage::begun;
            [[fallthrough]];
        case Stage::begun:
            if (!round.arriving.wait(policy)) return false;
            stage_ = Stage::awaited;
            [[fallthrough]];
        case Stage::awaited:
            policy.renew();
            end(round);
            stage_ = Stage::leaving;
            [[fallthrough]];
        case Stage::leaving:
            if (!round.sending.test()) return false;
            stage_ = Stage::begins;
        }
    }
    return true;
}

void Exchange::start(const Round& round) const {
    round.arriving.start();
    uint8_t* outgoing = round.sending.at();
    std::memcpy(outgoing, extremes_.data(), begin_nbytes);
    std::memcpy(outgoing + begin_nbytes, arrays_.at(), round.nbytes);
    round.sending.start();
}

// Check the length of a received message. Ranks that make the same call send the same number of bytes. If the calls differ, only the
// beginning of the message is read.
void Exchange::check_length(const Round& round) const {
    if (round.arriving.shared()) return;
    const MPIMessage* const by_mpi = round.arriving.mpi();
    const size_t came = by_mpi ? by_mpi->nbytes() : nb::cast<size_t>(round.wire.attr("nbytes"));
    const bool same = came >= begin_nbytes && same_call(round.arriving.at()) && same_call(round.arriving.at() + fingerprint_nbytes);
    if (came == round.length || (came >= begin_nbytes && !same)) return;
    const Acquired acquired;
    const std::string text = "a handshake's message of " + std::to_string(came) + " bytes came, where " + std::to_string(round.length) +
                             " are expected";
    PyErr_SetString(nb::module_::import_("compcoll.errors").attr("WireCorrupted").ptr(), text.c_str());
    throw nb::python_error();
}

// Return whether this is the fingerprint of this rank's call, except for the bits of the level.
bool Exchange::same_call(const uint8_t* fingerprint) const {
    constexpr size_t last = fingerprint_nbytes - 1;
    return std::memcmp(fingerprint, first_.data(), last) == 0 && (fingerprint[last] ^ first_[last]) <= levels;
}

std::optional<size_t> Exchange::level() const {
    const bool ended = round_ == rounds_.size() && same_call(extremes_.data()) && same_call(extremes_.data() + fingerprint_nbytes);
    if (!ended) return std::nullopt;
    const size_t highest = extremes_.back() & levels;
    return extremes_ == first_ ? highest : std::min<size_t>(highest, busy);  // not all ranks' arrays are on GPUs
}

void Exchange::end(const Round& round) {
    check_length(round);
    const uint8_t* others = round.arriving.at();
    const auto wider = [&](size_t at, bool larger) {  // fingerprints are big-endian, so memcmp orders them as numbers
        const int order = std::memcmp(others + at, extremes_.data() + at, fingerprint_nbytes);
        if (larger ? order > 0 : order < 0) std::memcpy(extremes_.data() + at, others + at, fingerprint_nbytes);
    };
    wider(0, false);
    wider(fingerprint_nbytes, true);
    if (round.to != 0) std::memcpy(arrays_.at() + round.to, others + begin_nbytes, round.nbytes);
    else if (piggyback_) piggyback_->take(others + begin_nbytes, round.before);
}

void compcoll::bind_exchange(nb::module_& m) {
    nb::class_<Exchange>(m, "Exchange")
        .def(nb::init<nb::handle, const std::vector<Exchange::Given>&>(), nb::arg("arrays"), nb::arg("rounds"))
        .def_prop_ro("extremes", &Exchange::extremes, "Smallest and largest fingerprint that this rank knows of.");
}
