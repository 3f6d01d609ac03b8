//! Collectives of several GPUs, compared with exact sums and with NCCL, and their times.
//!
//! Two, four and eight ranks, as far as there are GPUs; with one GPU, a rank that loops back. NCCL is left out where it is
//! not found. Prints one JSON object a line, and panics if anything fails.

mod exact;
mod failure;
mod ranks;
mod timing;

/// All checks and measurements.
pub fn run() {
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
