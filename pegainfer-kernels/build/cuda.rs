//! CUDA C++: one fat binary a source file.

use super::abi;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::{env, fmt::Write, fs};

/// Ampere (A100, then GeForce 30), Ada, Hopper, Blackwell (B200, then GeForce 50).
pub const DEFAULT_SM: &str = "80,86,89,90a,100a,120a";
const HOW: &str = "run tools/setup-cuda.sh, or set CUDA_HOME to a CUDA 12.8 or newer toolkit";

/// Directories with sources.
const DIRECTORIES: [&str; 2] = ["csrc", "tilelang"];

/// The sources, sorted; cargo watches their directories.
pub fn sources(root: &Path) -> Result<Vec<PathBuf>, String> {
    let mut sources = Vec::new();
    for directory in DIRECTORIES.map(|name| root.join(name)) {
        println!("cargo:rerun-if-changed={}", directory.display());
        let entries = fs::read_dir(&directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        sources.extend(paths.filter(|path| path.extension() == Some(OsStr::new("cu"))));
    }
    sources.sort();
    Ok(sources)
}

/// The compiler, unless this build is without CUDA.
pub fn nvcc(root: &Path) -> Result<Option<PathBuf>, String> {
    let wheels = root.join("../.cuda/nvidia/cu13/bin/nvcc");
    // A file that is not there counts as changed in every build; tools/setup-cuda.sh tells cargo when it comes.
    if wheels.exists() {
        println!("cargo:rerun-if-changed={}", wheels.display());
    }
    match env::var("PEGAINFER_CUDA").as_deref() {
        Err(_) | Ok("auto" | "") => Ok(find_nvcc(&wheels).or_else(|| {
            // The one kind of line of a build script that cargo shows.
            println!(
                "cargo:warning=building without GPU support: no nvcc was found; {HOW} (PEGAINFER_CUDA=off hides this)"
            );
            None
        })),
        Ok("off") => Ok(None),
        Ok("required") => {
            Ok(Some(find_nvcc(&wheels).ok_or_else(|| format!("PEGAINFER_CUDA=required, but there is no nvcc: {HOW}"))?))
        }
        Ok(other) => Err(format!("PEGAINFER_CUDA={other}: expected auto, required or off")),
    }
}

/// CUDA_HOME, the wheels, the PATH, the usual place: the first that has an nvcc.
fn find_nvcc(wheels: &Path) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc"));
    let mut candidates = home.into_iter().chain([wheels.to_path_buf()]);
    let on_path = env::split_paths(&path).map(|dir| dir.join("nvcc"));
    let usual = PathBuf::from("/usr/local/cuda/bin/nvcc");
    candidates.find(|nvcc| nvcc.is_file()).or_else(|| on_path.chain([usual]).find(|nvcc| nvcc.is_file()))
}

/// The wanted architectures, as `90a`, less those that this nvcc does not know.
pub fn architectures(nvcc: &Path) -> Result<Vec<String>, String> {
    let wanted = match env::var("PEGAINFER_CUDA_SM") {
        Ok(list) if !list.is_empty() => list,
        _ => present().unwrap_or_else(|| DEFAULT_SM.to_owned()),
    };
    let known = Command::new(nvcc).arg("--list-gpu-code").output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let known = String::from_utf8_lossy(&known.stdout).into_owned();
    let known = |sm: &str| known.lines().any(|line| line == format!("sm_{}", digits(sm)));
    let found: Vec<String> = wanted.split(',').map(str::trim).filter(|sm| known(sm)).map(str::to_owned).collect();
    match found.is_empty() {
        true => Err(format!("{} knows none of the architectures {wanted}", nvcc.display())),
        false => Ok(found),
    }
}

/// An architecture without its suffix: `90` of `90a`.
pub fn digits(sm: &str) -> &str {
    sm.trim_end_matches(|c: char| c.is_ascii_alphabetic())
}

/// Architectures of the GPUs here, if there is a driver to ask.
fn present() -> Option<String> {
    let asked = Command::new("nvidia-smi").args(["--query-gpu=compute_cap", "--format=csv,noheader"]).output().ok()?;
    let text = String::from_utf8(asked.stdout).ok().filter(|_| asked.status.success())?;
    let mut list: Vec<String> = text.lines().map(|cap| cap.trim().replace('.', "")).collect();
    list.sort();
    list.dedup();
    // From Hopper on, a chip's own instructions need the suffix.
    let suffixed = list.iter().filter_map(|sm| sm.parse::<u32>().ok());
    let list: Vec<String> = suffixed.map(|sm| if sm >= 90 { format!("{sm}a") } else { sm.to_string() }).collect();
    (!list.is_empty()).then(|| list.join(","))
}

/// Compiles every source, as many at a time as there are cores. Those of csrc/ include `abi/SOURCE.h`, and their kernels must
/// be the ones that [`abi`] lists; generated sources have launchers of their own.
pub fn compile(nvcc: &Path, architectures: &[String], sources: &[PathBuf], out: &Path) -> Result<(), String> {
    let flags: Vec<String> =
        architectures.iter().map(|sm| format!("-gencode=arch=compute_{sm},code=sm_{sm}")).collect();
    let own = |source: &Path| source.parent().is_some_and(|directory| directory.ends_with("csrc"));
    abi::write_limits(out)?;
    for source in sources.iter().filter(|source| own(source)) {
        abi::write_header(&stem(source), out)?;
    }
    let mut changed = Vec::new();
    for source in sources {
        let key = key(source, &flags, out)?;
        if fs::read_to_string(key_path(source, out)).ok().as_deref() != Some(&key) || !image_path(source, out).exists()
        {
            changed.push((source.clone(), key));
        }
    }
    let parallel = std::thread::available_parallelism().map_or(1, usize::from);
    for group in changed.chunks(parallel) {
        let start = |(source, _): &(PathBuf, String)| -> Result<(PathBuf, Child), String> {
            let mut command = Command::new(nvcc);
            command.args(["-fatbin", "-O3", "-std=c++17", "-lineinfo", "-Xfatbin=-compress-all"]).args(&flags);
            // ptxas reports the entry points.
            command.arg("-Xptxas=-v").arg("-I").arg(out).arg(source).arg("-o").arg(image_path(source, out));
            command.stderr(Stdio::piped());
            Ok((source.clone(), command.spawn().map_err(|e| format!("{}: {e}", nvcc.display()))?))
        };
        let running: Vec<_> = group.iter().map(start).collect::<Result<_, _>>()?;
        for ((source, child), (_, key)) in running.into_iter().zip(group) {
            let output = child.wait_with_output().map_err(|e| format!("nvcc: {e}"))?;
            let log = String::from_utf8_lossy(&output.stderr);
            log.lines().filter(|line| !abi::is_report(line)).for_each(|line| eprintln!("{line}"));
            if !output.status.success() {
                let (source, nvcc) = (source.display(), nvcc.display());
                return Err(format!("{nvcc} failed on {source}; PEGAINFER_CUDA=off builds without CUDA"));
            }
            if own(&source) {
                abi::check_entries(&stem(&source), &log)?;
            }
            fs::write(key_path(&source, out), key).map_err(|e| format!("{}: {e}", out.display()))?;
        }
    }
    Ok(())
}

/// A hash of all that an image is made of: a source whose key is unchanged is not compiled again.
fn key(source: &Path, flags: &[String], out: &Path) -> Result<String, String> {
    let mut hasher = DefaultHasher::new();
    flags.hash(&mut hasher);
    let directory = source.parent().unwrap_or(Path::new(""));
    let entries = fs::read_dir(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<PathBuf> = paths.filter(|path| path.extension() == Some(OsStr::new("cuh"))).collect();
    files.sort();
    files.extend([source.to_path_buf(), out.join("limits.h"), out.join(format!("abi/{}.h", stem(source)))]);
    // Generated sources have no list of arguments.
    for file in files.iter().filter(|file| file.exists()) {
        fs::read(file).map_err(|e| format!("{}: {e}", file.display()))?.hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

fn key_path(source: &Path, out: &Path) -> PathBuf {
    out.join(format!("{}.key", stem(source)))
}

fn stem(source: &Path) -> String {
    source.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn image_path(source: &Path, out: &Path) -> PathBuf {
    out.join(format!("{}.fatbin", stem(source)))
}

/// One static `Image` a source. The driver wants fat binaries aligned; `include_bytes!` alone is not.
pub fn images(sources: &[PathBuf], out: &Path, built: bool) -> String {
    let mut text = format!("/// Whether this build has GPU code.\npub const BUILT: bool = {built};\n");
    for source in sources {
        let name = stem(source);
        let bytes = match built {
            true => format!("&Aligned(*include_bytes!({:?})).0", image_path(source, out)),
            false => "&[]".to_owned(),
        };
        let directory = source.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        let _ = writeln!(
            text,
            "/// Of {directory}/{name}.cu.\npub static {}: Image = Image {{ name: {name:?}, bytes: {bytes} }};",
            name.to_uppercase()
        );
    }
    let names: Vec<String> = sources.iter().map(|source| format!("&{}", stem(source).to_uppercase())).collect();
    let _ = writeln!(text, "/// All of them.\npub static ALL: &[&Image] = &[{}];", names.join(", "));
    text
}
