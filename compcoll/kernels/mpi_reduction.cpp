// compcoll.kernels._host.MPIReduction: MPI's own allreduce, or reduce_scatter of equal blocks. mpi4py would release and take back
// the GIL within a call, which takes 5 ms beside a thread that computes in Python.
#include <climits>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>

#include "bindings.h"
#include "buffer.h"
#include "mpi_library.h"
#include "operation.h"
#include "python_calls.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

class MPIReduction final : public Operation {
public:
    // `function` is the address of MPI's function. The buffer's format decides the datatype. The input has `blocks` times the size
    // of the result. `by_python` reduces arrays that this class cannot: with more elements than an int counts, or not as a
    // contiguous buffer of a known format.
    MPIReduction(const MPILibrary& library, uintptr_t function, uint64_t comm, uint64_t op, size_t blocks, nb::object by_python)
        : library_(library), function_(reinterpret_cast<void*>(function)), comm_(comm), op_(op), blocks_(blocks), by_python_(by_python) {}

    void begin(nb::handle x, nb::handle out, nb::handle, uint64_t) override {
        if (running_) throw nb::value_error("the one before has not ended");
        if (!take(x, out)) {
            release();
            others_ = nb::make_tuple(x, out);
        }
        running_ = true;
    }

    bool advance(WaitPolicy&) override {
        if (!running_) return false;
        const bool by_address = !others_.is_valid();
        if (by_address && !code_) {
            const Released released;
            code_ = reduce();
        }
        if (without_gil) return by_address;  // the rest follows in the next `advance`, with the GIL
        running_ = false;
        const nb::object others = std::move(others_);
        const int code = code_.value_or(0);
        release();
        if (!by_address) by_python_(*others);
        library_.check(code);
        return true;
    }

    bool done() const override { return !running_; }

    bool needs_python() const override { return false; }

    void cancel() override {
        running_ = false;
        others_.reset();
        release();
    }

    void call(nb::handle x, nb::handle out) {
        begin(x, out, nb::none(), 0);
        WaitPolicy policy;
        advance(policy);
    }

    Account account() const override { return {-1}; }

private:
    // Return whether MPI can reduce these arrays.
    bool take(nb::handle x, nb::handle out) {
        constexpr int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT;
        x_.emplace(x, flags, std::nothrow);
        out_.emplace(out, flags | PyBUF_WRITABLE, std::nothrow);
        if (!*x_ || !*out_ || x_->nbytes() != blocks_ * out_->nbytes()) return false;
        const auto& view = out_->view();
        const auto known = library_.datatypes.find(view.format);
        if (known == library_.datatypes.end() || known->first != x_->view().format) return false;
        const size_t n = out_->nbytes() / static_cast<size_t>(view.itemsize);
        if (n > INT_MAX) return false;
        datatype_ = known->second;
        n_ = static_cast<int>(n);
        return true;
    }

    int reduce() const {
        const void* input = x_->at() == out_->at() ? library_.in_place : x_->at();
        return library_.with_handles([&](auto handle) {
            using Handle = decltype(handle(0));
            const auto function = reinterpret_cast<int (*)(const void*, void*, int, Handle, Handle, Handle)>(function_);
            return function(input, out_->at(), n_, handle(datatype_), handle(op_), handle(comm_));
        });
    }

    void release() {
        x_.reset();
        out_.reset();
        code_.reset();
    }

    const MPILibrary& library_;
    void* function_;
    uint64_t comm_, op_;
    size_t blocks_;
    nb::object by_python_, others_;  // `others_` holds the arrays that `by_python_` reduces
    std::optional<Buffer> x_, out_;
    uint64_t datatype_ = 0;
    int n_ = 0;
    bool running_ = false;
    std::optional<int> code_;  // MPI's error code, once it has reduced
};

}  // namespace

void compcoll::bind_mpi_reduction(nb::module_& m) {
    nb::class_<MPIReduction, Operation>(m, "MPIReduction")
        .def(nb::init<const MPILibrary&, uintptr_t, uint64_t, uint64_t, size_t, nb::object>(), nb::keep_alive<1, 2>(), nb::arg("library"),
             nb::arg("function"), nb::arg("comm"), nb::arg("op"), nb::arg("blocks"), nb::arg("by_python"))
        .def("__call__", &MPIReduction::call, nb::arg("x"), nb::arg("out"), "Reduce the first argument into the second.");
}
