// compcoll.kernels._host.Executor: a communicator's blocking collectives in one go, from the opening to the result, while nobody
// has others to advance. After a large one little of what this runs through is in the CPU's caches: it is short, and asks Python
// only for what is not usual. Repeated on two ranks, 4 bytes take 1.2 us by it and 8.8 by Runs._steps, which knows every
// other case (7 times as long), and a ring of 4 KiB with ZFP 5.3 us and 12.7 (2.4 times; 3 in the machine's fast spells).
#include "executor.h"

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "body.h"
#include "exchange.h"
#include "known_calls.h"
#include "patience.h"
#include "python_calls.h"
#include "two_ways.h"

namespace nb = nanobind;
using namespace compcoll;

namespace {

constexpr size_t most_known = 64;

using Waits = std::pair<size_t, size_t>;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Takes back what a body began, where all ranks do not make the same call.
class Withdrawn {
public:
    explicit Withdrawn(Body& body) : body_(&body) {}
    ~Withdrawn() {
        if (body_) body_->withdraw_beginning();
    }
    void keep() { body_ = nullptr; }

private:
    Body* body_;
};

class Executor {
public:
    Executor(const KnownCalls& calls, nb::object exchanges, nb::object under_way, Waits alone, Waits beside, nb::object wanted,
             bool decides)
        : calls_(calls), exchanges_(exchanges), plain_(exchanges[0]), under_way_(under_way), wanted_(wanted), decides_(decides),
          alone_{alone.first, alone.second}, beside_{beside.first, beside.second},
          contended_{alone.first > Patience::few ? longer : alone.first, alone.second} {}

    // A collective like one that was kept; None if there is none, it has no body yet, or calls wait for others.
    nb::object repeat(nb::handle owner, const KnownCalls::Arguments& given) {
        if (!ready || !given.feedback.is_none()) return nb::none();
        const auto found = calls_.find(given);
        if (!found) return nb::none();
        const nb::object body = found->recipe.attr("body");
        if (body.is_none()) return nb::none();
        return run(owner, given.collective, found->recipe, body, given.x, found->nbytes, found->out, found->out, nb::none());
    }

    // Runs a recipe's body, once all ranks are known to make the same call.
    nb::object run(nb::handle owner, nb::object collective, nb::object recipe, nb::object body, nb::object x, size_t nbytes,
                   nb::object out, nb::object result, nb::object residual) {
        const Recipe known = look_up(recipe);  // a copy: others may be looked up meanwhile
        const nb::object usual = body;
        Body* running = &nb::cast<Body&>(body);
        const uint64_t number = begun++;
        const double started = now();
        try {
            nb::object exchange = plain_;
            if (known.along) {
                known.along->load(x, residual, number);
                exchange = exchanges_[known.along->nbytes()];
            }
            const bool busy = PySet_Size(under_way_.ptr()) > 0;
            Exchange& opening = nb::cast<Exchange&>(exchange);
            size_t level = busy ? must_not_block : known.ways && wanted() ? wanted_by_others : free_of_others;
            if (level == wanted_by_others) contended_until_ = started + lasting;
            Way way = Way::usual;
            const bool contended = known.ways && started < contended_until_;
            Patience patience = busy ? beside_ : contended ? contended_ : alone_;
            patience.naps = std::min(patience.naps, known.most_naps);
            if (!busy && contended) way = decides_ ? known.ways->next() : known.ways->last();
            if (decides_ && way == Way::other) level = other_way;
            const auto take = [&](Way chosen) {
                way = chosen;
                body = way == Way::other ? known.other.attr("body") : usual;
                running = &nb::cast<Body&>(body);
            };
            const auto fits = [&] { return level < must_not_block && (level == other_way) == (way == Way::other); };
            if (way == Way::other) take(way);
            // Without Python in between, the GIL is let go once and taken back once.
            const bool in_one_go = !busy && running->without_python() && opening.without_python();
            bool begun_already = false;
            if (in_one_go) {
                running->begin(x, out, residual, number, patience);
                opening.prepare(known.extremes[level], known.along_object, patience);
                Withdrawn unless_it_fits(*running);
                bool settled = false;
                {
                    const Released released;
                    settled = settle(opening, opening.go([&] { running->advance_ahead(); }), level);
                    if (settled && fits()) {
                        unless_it_fits.keep();
                        running->advance();
                    }
                }
                if (!settled) level = nb::cast<size_t>(owner.attr("_settle_opening")(recipe, level));
                if ((begun_already = fits())) unless_it_fits.keep();
            } else {
                std::function<void()> meanwhile;
                if (!busy) meanwhile = [&] { running->run_ahead(x, number); };
                if (!settle(opening, opening.run(known.extremes[level], known.along_object, patience, meanwhile), level))
                    level = nb::cast<size_t>(owner.attr("_settle_opening")(recipe, level));
            }
            if (level >= must_not_block)
                return owner.attr("_beside_others")(collective, recipe, x, out, result, residual, number);
            if (level == wanted_by_others || (level == other_way && !decides_)) contended_until_ = started + lasting;
            if (!begun_already) {
                take(level == other_way ? Way::other : Way::usual);
                running->begin(x, out, residual, number, patience);
            }
            running->advance();
            if (!running->done()) owner.attr("_follow")(body, recipe);
            if (known.ways && started < contended_until_) known.ways->took(way, now() - started);
            if (way == Way::other) recipe = known.other;
        } catch (const nb::python_error& error) {
            owner.attr("_failed")(error.value(), recipe, x, out, residual);
            throw;
        } catch (const std::exception& error) {  // the kernels' own
            const nb::handle kind = dynamic_cast<const std::bad_alloc*>(&error) ? PyExc_MemoryError : PyExc_RuntimeError;
            owner.attr("_failed")(kind(error.what()), recipe, x, out, residual);
            throw;
        }
        last_ = {collective, recipe, body, nbytes, now() - started};
        return result;
    }

    // Of what ended last: what was put here, or what an account can be made of, since nobody may ever read it.
    nb::object account() const {
        if (!last_.collective.is_valid()) return account_;
        return nb::make_tuple(last_.collective, last_.recipe, last_.body, last_.nbytes, last_.seconds);
    }

    void set_account(nb::object account) {
        account_ = account;
        last_ = {};
    }

    bool ready = true;
    uint64_t begun = 0;

private:
    // What a rank tells the others of itself (compcoll/collectives/signature.py).
    enum Level : size_t { free_of_others, wanted_by_others, other_way, usual_way, must_not_block };
    // Looks, of a microsecond, where others want the cores: who sleeps may get its own back a slice later, and who looks uses up what
    // it has. Beside 1 to 4 others, processes or threads, 64 KiB to 4 MiB took least with 300, and more with 50 and from 1500 on.
    static constexpr size_t longer = 300;
    static constexpr double lasting = 0.5;  // seconds for which what was seen of others holds, at least

    // What is needed of a Python recipe.
    struct Recipe {
        nb::object recipe, along_object, other;
        Along* along;
        std::array<nb::bytes, must_not_block + 1> extremes;  // by level
        size_t most_naps;  // by the calls' own time-out, if they have one
        std::shared_ptr<TwoWays> ways;  // null if there is no other
    };

    struct Last {
        nb::object collective, recipe, body;
        size_t nbytes = 0;
        double seconds = 0.0;
    };

    const Recipe& look_up(nb::handle recipe) {
        for (const Recipe& each : known_)
            if (each.recipe.is(recipe)) return each;
        if (known_.size() == most_known) known_.pop_front();
        const nb::object plan = recipe.attr("plan"), along = recipe.attr("along"), extremes = plan.attr("signature").attr("extremes");
        const nb::object timeout = recipe.attr("timeout");
        Recipe known{nb::borrow(recipe), along, recipe.attr("other"), along.is_none() ? nullptr : &nb::cast<Along&>(along), {},
                     timeout.is_none() ? std::numeric_limits<size_t>::max() : Patience::naps_within(nb::cast<double>(timeout)), {}};
        for (size_t level = 0; level < known.extremes.size(); ++level) known.extremes[level] = nb::bytes(extremes[level]);
        if (!known.other.is_none()) known.ways = std::make_shared<TwoWays>();
        known_.push_back(known);
        return known_.back();
    }

    // Whether an opening needs no more to be settled: all agreed, or all told what level counts, and it needs nothing of Python's.
    static bool settle(const Exchange& opening, bool agreed, size_t& level) {
        if (agreed) return true;
        const auto highest = opening.level();
        if (!highest || *highest >= must_not_block) return false;
        level = *highest;
        return true;
    }

    // Whether others want this rank's core.
    bool wanted() const { return !wanted_.is_none() && is_true(wanted_); }

    const KnownCalls& calls_;
    nb::object exchanges_, plain_, under_way_, wanted_;
    const bool decides_;
    double contended_until_ = 0.0;
    const Patience alone_, beside_, contended_;  // with no other calls, with some, and where others want the cores
    nb::object account_ = nb::none();
    std::deque<Recipe> known_;
    Last last_;
};

}  // namespace

void compcoll::bind_executor(nb::module_& m) {
    nb::class_<TwoWays>(m, "TwoWays")
        .def(nb::init<>())
        .def_prop_ro("other", [](const TwoWays& self) { return self.next() == Way::other; }, "Whether the next call takes the other way.")
        .def("took", [](TwoWays& self, bool other, double seconds) { self.took(other ? Way::other : Way::usual, seconds); },
             nb::arg("other"), nb::arg("seconds"), "Tell what a call took, by the other way or the usual one.");
    nb::class_<Executor>(m, "Executor")
        .def(nb::init<const KnownCalls&, nb::object, nb::object, Waits, Waits, nb::object, bool>(), nb::keep_alive<1, 2>(), nb::arg("calls"),
             nb::arg("exchanges"), nb::arg("under_way"), nb::arg("alone"), nb::arg("beside"),
             nb::arg("wanted").none(), nb::arg("decides"))
        .def_rw("ready", &Executor::ready, "Whether calls may be repeated without a look at what was started before.")
        .def_rw("begun", &Executor::begun, "How many collectives began, of all kinds.")
        .def_prop_rw("account", &Executor::account, &Executor::set_account, nb::for_setter(nb::arg("account").none()),
                     "What was put here of what ended last, or what an account is made of.")
        .def("repeat", [](Executor& self, nb::handle owner, nb::object collective, nb::object x, nb::object param, nb::object out,
                          nb::object feedback, const nb::tuple& asked) {
            return self.repeat(owner, {collective, x, param, out, feedback, asked});
        }, nb::arg("owner"), nb::arg("collective"), nb::arg("x").none(), nb::arg("param").none(), nb::arg("out").none(),
             nb::arg("feedback").none(), nb::arg("asked"),
             "Run a communicator's collective like one that was kept; None if that cannot be.")
        .def("run", &Executor::run, nb::arg("owner"), nb::arg("collective"), nb::arg("recipe"), nb::arg("body"), nb::arg("x"),
             nb::arg("nbytes"), nb::arg("out"), nb::arg("result"), nb::arg("residual").none(),
             "Run a recipe's body, once all ranks are known to make the same call.");
}
