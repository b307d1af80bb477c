// A persistent message, sent or received repeatedly: through shared memory, by MPI, or by a Python object.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "mpi_message.h"
#include "wait_policy.h"
#include "python_calls.h"
#include "shared_message.h"

namespace compcoll {

class Message {
public:
    explicit Message(nanobind::object message)
        : object_(message), shared_(nanobind::isinstance<SharedMessage>(message) ? &nanobind::cast<SharedMessage&>(message) : nullptr),
          mpi_(nanobind::isinstance<MPIMessage>(message) ? &nanobind::cast<MPIMessage&>(message) : nullptr) {
        if (shared_ || mpi_) return;
        start_ = message.attr("Start");
        test_ = message.attr("Test");
    }

    void start() const {
        if (shared_) shared_->start();
        else if (mpi_) mpi_->start();
        else call(start_);
    }

    bool test() const { return shared_ ? shared_->test() : mpi_ ? mpi_->test() : is_true(test_); }

    bool wait(WaitPolicy& policy) const {
        if (shared_) return shared_->wait(policy);
        return mpi_ ? mpi_->wait(policy) : policy.poll_python([&] { return is_true(test_); });
    }

    // Whether all calls work without Python. Only a Python `progress` of a shared message is called after a while.
    bool without_python() const { return shared_ || mpi_; }

    // The message as one of these types, or null.
    SharedMessage* shared() const { return shared_; }
    MPIMessage* mpi() const { return mpi_; }

    nanobind::object object() const { return object_; }

private:
    nanobind::object object_, start_, test_;
    SharedMessage* shared_;
    MPIMessage* mpi_;
};

}  // namespace compcoll
