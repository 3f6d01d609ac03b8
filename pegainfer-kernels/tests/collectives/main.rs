//! Collectives of several GPUs, compared with exact sums and with NCCL, and their times:
//!
//!     PEGAINFER_TEST_DEVICE=cuda cargo test --release -p pegainfer-kernels --test collectives
//!
//! Two, four and eight ranks, as far as there are GPUs; with one GPU, a rank that loops back. NCCL is left out where it is
//! not found. Prints one JSON object a line; exits with 1 if anything fails.

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
        if gpus < count {
            println!("{{\"ranks\":{count},\"skipped\":\"there are {gpus} GPUs\"}}");
            continue;
        }
        let start = std::time::Instant::now();
        exact::sums(count);
        exact::columns(count);
        exact::rows(count);
        exact::queued(count);
        exact::replayed(count);
        failure::late(count);
        failure::absent(count);
        failure::aborted(count);
        println!("{{\"ranks\":{count},\"passed\":true,\"seconds\":{:.1}}}", start.elapsed().as_secs_f64());
        timing::run(count);
    }
}
