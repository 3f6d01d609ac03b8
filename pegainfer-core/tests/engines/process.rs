//! Tests that need a process of their own.

use std::process::Command;

/// Environment variable set in the child process.
const VARIABLE: &str = "PEGAINFER_TEST_OWN_PROCESS";

/// Runs the calling test in a separate process without other tests, for tests that measure the memory of their process
/// or lose the GPU's context.
pub fn in_own_process(test: impl FnOnce()) {
    if std::env::var_os(VARIABLE).is_some() {
        return test();
    }
    let thread = std::thread::current();
    let name = thread.name().expect("the test harness names the thread of a test after it");
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args([name, "--exact", "--nocapture"]).env(VARIABLE, "1").output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    println!("{stdout}{stderr}");
    assert!(output.status.success() && stdout.contains("1 passed"), "{name} failed in a process of its own");
}
