#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "futex.h"

namespace compcoll {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr size_t nbytes_worth_a_thread = 524288;   // with less work, waking a thread costs more than it saves
constexpr size_t most_jobs = 16;                   // threads that call kernels at the same time
constexpr int most_helpers = 0xff;
constexpr microseconds spin{20};                   // about the cost of a sleep and a wake
constexpr microseconds noticed{200};               // a longer wait was caused by the system, not by the work
constexpr milliseconds first_rest{10}, longest_rest{640};

// A job's generation, the number of helpers that may still join, and the range of free pieces, packed into one atomic word.
struct Ticket {
    uint32_t generation, seats, begin, end;

    static Ticket of(uint64_t bits) {
        const auto field = [&](int at, uint64_t mask) { return static_cast<uint32_t>(bits >> at & mask); };
        return {field(32, 0xffffffff), field(24, most_helpers), field(12, most_pieces), field(0, most_pieces)};
    }
    uint64_t bits() const { return uint64_t{generation} << 32 | uint64_t{seats} << 24 | uint64_t{begin} << 12 | end; }
    bool over() const { return begin == end; }
};

struct alignas(64) Job {
    std::atomic<uint64_t> ticket{0};
    // These belong to the ticket's generation while pieces are left.
    std::atomic<const void*> work{nullptr};
    std::atomic<PieceWork::Call> call{nullptr};
    alignas(64) Word done{0};           // pieces finished by helpers
    std::atomic<bool> awaited{false};   // whether the caller sleeps until `done` changes
    std::atomic<bool> failed{false};
    std::exception_ptr error;           // of the helper that set `failed`
    std::atomic<bool> used{false};
};

// Never freed: helpers sleep in its memory when the process ends.
struct Team {
    std::array<Job, most_jobs> jobs;
    alignas(64) Word calls{0};  // changes with each new job
    std::atomic<uint32_t> sleepers{0};
    std::atomic<int> helpers{0};
    // `useful` helpers were of use recently; those of the last `in_vain` jobs were not. Until `rest_until` (ns of the clock), no more
    // than `useful` are woken; `rest` is the length of that time (ns).
    std::atomic<int> useful{most_helpers}, in_vain{0};
    std::atomic<int64_t> rest_until{0}, rest{0};
};

Team& team = *new Team;
pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

// A piece that a thread has taken from a job.
struct Taken {
    uint32_t generation;
    size_t piece = 0;
    const void* work = nullptr;
    PieceWork::Call call = nullptr;
};

// The caller takes pieces from the beginning, helpers from the end. The next call on the same memory then finds its data in the
// same core's caches.
bool take_first(Job& job, Taken& taken) {
    uint64_t seen = job.ticket.load();
    for (;;) {
        Ticket ticket = Ticket::of(seen);
        if (ticket.over()) return false;
        taken.piece = ticket.begin++;
        if (job.ticket.compare_exchange_weak(seen, ticket.bits())) return true;
    }
}

// Take the last piece: of the same generation if seated, otherwise of any generation with a free seat.
bool take_last(Job& job, Taken& taken, bool seated) {
    uint64_t seen = job.ticket.load();
    for (;;) {
        Ticket ticket = Ticket::of(seen);
        if (ticket.over() || (seated ? ticket.generation != taken.generation : ticket.seats == 0)) return false;
        taken = {ticket.generation, --ticket.end, job.work.load(), job.call.load()};
        if (!seated) --ticket.seats;
        if (job.ticket.compare_exchange_weak(seen, ticket.bits())) return true;  // so the generation has not changed
    }
}

// Help with a job. Return whether there was a piece to process.
bool help(Job& job) {
    Taken taken{};
    bool seated = false;
    for (; take_last(job, taken, seated); seated = true) {
        try {
            taken.call(taken.work, taken.piece);
        } catch (...) {
            if (!job.failed.exchange(true)) job.error = std::current_exception();
        }
        ++job.done;  // the job may be over and replaced by another: the wake is then spurious
        if (job.awaited) wake(job.done, Among::threads);
    }
    return seated;
}

// A helper spins before it sleeps only if the last job came within that time. On contended cores, spinning after each job takes
// more time from other threads than waking costs.
void help_forever() {
    for (bool in_quick_succession = false;;) {
        const uint32_t calls = team.calls.load();
        for (Job& job : team.jobs) help(job);
        const auto idle_since = Clock::now();
        if (in_quick_succession)
            while (team.calls.load() == calls && Clock::now() - idle_since < spin) relax();
        if (team.calls.load() == calls) {
            team.sleepers.fetch_add(1);
            if (team.calls.load() == calls) sleep_while(team.calls, calls, Among::threads);
            team.sleepers.fetch_sub(1);
        }
        in_quick_succession = Clock::now() - idle_since < spin;
    }
}

// After a fork the child has only this thread: no helper would end the jobs of other threads.
void begin_anew() {
    pthread_mutex_init(&starting, nullptr);
    team.helpers = 0;
    team.sleepers = 0;
    for (Job& job : team.jobs) {
        job.ticket = Ticket{Ticket::of(job.ticket).generation, 0, 0, 0}.bits();
        job.used = false;
    }
}

void lock_starting() { pthread_mutex_lock(&starting); }
void unlock_starting() { pthread_mutex_unlock(&starting); }

// Start helpers up to this number, or as many as the system allows.
void want_helpers(int helpers) {
    if (team.helpers.load(std::memory_order_relaxed) >= helpers) return;
    static const int registered = pthread_atfork(lock_starting, unlock_starting, begin_anew);
    static_cast<void>(registered);
    if (pthread_mutex_trylock(&starting) != 0) return;  // another thread is starting helpers
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the application's own threads
    try {
        for (; team.helpers.load() < helpers; ++team.helpers) {
            std::thread helper(help_forever);
            pthread_setname_np(helper.native_handle(), "compcoll-helper");
            helper.detach();
        }
    } catch (const std::system_error&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    unlock_starting();
}

int64_t count_of(Clock::duration time) { return time / std::chrono::nanoseconds(1); }

// The number of helpers worth waking now.
int useful_helpers(int helpers, Clock::time_point now) {
    const int useful = team.useful.load(std::memory_order_relaxed);
    const bool rested = count_of(now.time_since_epoch()) >= team.rest_until.load(std::memory_order_relaxed);
    return rested ? helpers : std::min(helpers, useful);
}

// Record whether a job's helpers were useful. If not, twice in a row, half as many are woken during a rest. Then all are tried
// again; if that is useless, the next rest is twice as long.
void learn(int helpers, bool of_use, Clock::time_point now) {
    const bool trial = helpers > team.useful.load(std::memory_order_relaxed);
    if (of_use) {
        team.in_vain = 0;
        if (trial) team.useful = helpers;
        return;
    }
    if (!trial && team.in_vain.fetch_add(1) == 0) return;
    team.in_vain = 0;
    const int64_t time = count_of(now.time_since_epoch());
    const bool again = time - team.rest_until < count_of(longest_rest);
    team.rest = std::clamp(again ? 2 * team.rest.load() : 0, count_of(first_rest), count_of(longest_rest));
    team.rest_until = time + team.rest;
    if (!trial) team.useful = helpers / 2;
}

// The number of involuntary context switches of this thread.
long cores_lost() {
    rusage used{};
    getrusage(RUSAGE_THREAD, &used);
    return used.ru_nivcsw;
}

// Wait until helpers have finished this many pieces.
void await(Job& job, uint32_t pieces) {
    const auto begun = Clock::now();
    while (job.done.load() != pieces && Clock::now() - begun < spin) relax();
    job.awaited = true;
    for (uint32_t done; (done = job.done.load()) != pieces;) sleep_while(job.done, done, Among::threads);
    job.awaited = false;
}

Job* free_job() {
    for (Job& job : team.jobs)
        if (!job.used.load(std::memory_order_relaxed) && !job.used.exchange(true)) return &job;
    return nullptr;
}

// Offers a job to helpers, and takes it back.
class Offer {
public:
    Offer(Job& job, size_t count, int helpers, PieceWork work) : job_(job), work_(work), count_(static_cast<uint32_t>(count)) {
        job.work = work.work();
        job.call = work.call();
        job.done = 0;
        job.ticket = Ticket{generation() + 1, static_cast<uint32_t>(helpers), 0, count_}.bits();
        ++team.calls;
        if (team.sleepers > 0) wake(team.calls, Among::threads, helpers);
    }

    ~Offer() {
        job_.failed = false;
        job_.error = nullptr;
        job_.used = false;
    }

    // Process this thread's pieces.
    void work() {
        for (Taken taken{}; take_first(job_, taken);) work_.call()(work_.work(), taken.piece);
    }

    // Let nobody begin another piece, and wait for the helpers. Return how many pieces this thread and the helpers have done.
    std::pair<size_t, size_t> take_back() {
        const Ticket last = Ticket::of(job_.ticket.exchange(Ticket{generation(), 0, 0, 0}.bits()));
        await(job_, count_ - last.end);
        return {last.begin, count_ - last.end};
    }

    std::exception_ptr error() const { return job_.failed ? job_.error : nullptr; }

private:
    uint32_t generation() const { return Ticket::of(job_.ticket).generation; }

    Job& job_;
    PieceWork work_;
    uint32_t count_;
};

void work_alone(size_t count, PieceWork work) {
    for (size_t piece = 0; piece < count; ++piece) work.call()(work.work(), piece);
}

}  // namespace

void in_pieces(size_t count, int threads, PieceWork work) {
    const int wanted = std::min({threads - 1, most_helpers, static_cast<int>(std::min(count, most_pieces)) - 1});
    if (wanted < 1 || count > most_pieces) return work_alone(count, work);
    const auto begun = Clock::now();
    const int helpers = useful_helpers(wanted, begun);
    Job* const job = helpers < 1 ? nullptr : free_job();
    if (job == nullptr) return work_alone(count, work);
    want_helpers(helpers);
    const long lost_before = cores_lost();  // per job, as losses between jobs do not count
    Offer offer(*job, count, helpers, work);
    std::exception_ptr error;
    try {
        offer.work();
    } catch (...) {
        error = std::current_exception();
    }
    const auto worked = Clock::now();
    const auto [own, theirs] = offer.take_back();
    const auto ended = Clock::now();
    // Without helpers, at this thread's own pace, it would have taken less time. A helper that came too late for a piece costs
    // nothing.
    const bool late = ended - worked > noticed && (ended - begun) * own > (worked - begun) * count;
    // If this thread lost its core, other work wants the cores. Time gained by a helper is then taken from it, perhaps from other ranks.
    if (theirs > 0) learn(helpers, !late && cores_lost() == lost_before, ended);
    if (!error) error = offer.error();
    if (error) std::rethrow_exception(error);
}

int team_size(size_t nbytes, int threads) {
    return std::clamp(threads, 1, static_cast<int>(std::min<size_t>(nbytes / nbytes_worth_a_thread + 1, 1024)));
}

}  // namespace compcoll
