// A short message through memory that two ranks share, sent or received repeatedly.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "buffer.h"
#include "mpi_library.h"
#include "wait_policy.h"
#include "python_calls.h"

namespace compcoll {

// One end of a shared-memory message. It uses two slots alternately: the previous message may still be read while the next is
// written. The sender must know that the message before the previous one was read. A slot begins with the number of its message,
// which also announces the content; both are in one cache line if the message is short. A receiver that waits for long sleeps on
// the number, and sets `asleep` beside it.
class SharedMessage {
    struct Head {
        Word number, asleep;
    };

public:
    static constexpr size_t head_nbytes = sizeof(Head);

    // The two slots are `nbytes` bytes of the memory from `at` on. `progress` is called now and then while nothing arrives.
    SharedMessage(nanobind::handle memory, size_t at, size_t nbytes, bool sending, nanobind::object progress)
        : memory_(memory, PyBUF_WRITABLE), at_(at), slot_(nbytes / 2), ahead_(sending), progress_(progress),
          probe_(nanobind::isinstance<MPIProbe>(progress) ? &nanobind::cast<MPIProbe&>(progress) : nullptr) {
        if (slot_ % line != 0 || slot_ <= head_nbytes || at % line != 0 || at + nbytes > memory_.nbytes() ||
            reinterpret_cast<uintptr_t>(memory_.at()) % line != 0)
            throw nanobind::value_error("two slots of whole cache lines are needed");
    }

    // The content to send next, or received last.
    uint8_t* content() const { return slot() + head_nbytes; }
    size_t nbytes() const { return slot_ - head_nbytes; }

    void start() {
        if (ahead_) {
            head().number.store(number_ + 1);
            if (head().asleep.load()) wake(head().number, Among::processes);
        }
        ++number_;
    }

    // Return whether the message has arrived.
    bool test() {
        if (soon()) return true;
        if (++vain_ % between_progress != 0) return false;
        let_progress();
        return there();
    }

    // Wait for the message as the policy allows. Sleeps release the GIL, except for a Python `progress`.
    bool wait(WaitPolicy& policy) {
        for (size_t i = 0; i < policy.spins; ++i)
            if (policy.may_sleep() ? soon() : test()) return true;
        if (!policy.may_sleep()) return false;
        const Released released;
        sleeps_ = 0;
        return policy.poll_memory([&] { return there(); }) || policy.sleep([&] { return there(); }, [&](auto most) { sleep(most); });
    }

private:
    static constexpr size_t line = 64;
    static constexpr size_t spins = 4;  // shorter than a poll of an MPI message
    static constexpr size_t between_progress = 16;
    static constexpr size_t sleeps_between_progress = 8;  // over 10 ms between calls of a `progress` that needs the GIL

    bool soon() const {
        for (size_t i = 0; i < spins; ++i, relax())
            if (there()) return true;
        return false;
    }

    uint8_t* slot() const { return memory_.at() + at_ + (number_ + ahead_) % 2 * slot_; }
    Head& head() const { return *reinterpret_cast<Head*>(slot()); }
    bool there() const { return ahead_ || head().number.load() == number_; }

    void let_progress() const {
        if (probe_) {
            probe_->look();
            return;
        }
        const Acquired acquired;
        call(progress_);
    }

    // Sleep until the message arrives, for at most `most`.
    void sleep(std::chrono::microseconds most) {
        if (probe_ || ++sleeps_ % sleeps_between_progress == 0) let_progress();
        sleep_unless([&] { return there(); }, head().number, head().asleep, uint32_t{1}, most);
    }

    Buffer memory_;
    size_t at_, slot_;
    bool ahead_;
    nanobind::object progress_;
    const MPIProbe* probe_;  // `progress_`, if it is an MPIProbe
    uint32_t number_ = 0;
    size_t vain_ = 0, sleeps_ = 0;
};
inline void bind_shared_message(nanobind::module_& m) {
    namespace nb = nanobind;
    nb::class_<SharedMessage>(m, "SharedMessage")
        .def(nb::init<nb::handle, size_t, size_t, bool, nb::object>(), nb::arg("memory"), nb::arg("at"), nb::arg("nbytes"),
             nb::arg("sending"), nb::arg("progress"))
        .def("Test", &SharedMessage::test, "Whether it has come, or was sent.");
}

}  // namespace compcoll
