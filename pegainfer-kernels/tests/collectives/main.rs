//! Collectives of several GPUs, compared with exact sums and with NCCL, and their times:
//!
//!     PEGAINFER_TEST_DEVICE=cuda cargo test --release -p pegainfer-kernels --test collectives
//!
//! Two and four ranks, and eight where there are as many GPUs. Where there are fewer GPUs than ranks, ranks share them: everything is
//! checked, and nothing is timed. NCCL is left out where it is not found. Prints one JSON object a line; exits with 1 if
//! anything fails.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test may panic, and this one reports")]

mod exact;
mod failure;
mod ranks;
mod timing;

fn main() {
    if std::env::var("PEGAINFER_TEST_DEVICE").as_deref() != Ok("cuda") {
        println!("skipped: collectives run on GPUs, with PEGAINFER_TEST_DEVICE=cuda");
        return;
    }
    let gpus = pegainfer_kernels::cuda::available().unwrap();
    println!("{{\"gpus\":{gpus}}}");
    exact::loop_back();
    for count in [2, 4, 8] {
        if count > 4 && gpus < count {
            continue;
        }
        let start = std::time::Instant::now();
        exact::sums(count);
        exact::columns(count);
        exact::queued(count);
        exact::replayed(count);
        failure::late(count);
        failure::absent(count);
        failure::aborted(count);
        println!("{{\"ranks\":{count},\"passed\":true,\"seconds\":{:.1}}}", start.elapsed().as_secs_f64());
        if gpus >= count {
            timing::run(count);
        }
    }
}
