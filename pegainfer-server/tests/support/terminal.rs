//! A pseudo-terminal that runs a program.

use rustix::process::{ioctl_tiocsctty, setsid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Maximum time that a test waits for the program.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A program with a terminal as its standard streams, which sends it signals.
pub struct Terminal {
    child: Child,
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    /// Output of the program since the last wait.
    text: String,
}

impl Terminal {
    pub fn start(command: &mut Command) -> Self {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        tcsetwinsize(&controller, Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let name = ptsname(&controller, Vec::new()).unwrap();
        let open = || File::options().read(true).write(true).open(OsStr::from_bytes(name.as_bytes())).unwrap();
        command.env("TERM", "xterm").stdin(open()).stdout(open()).stderr(open());
        // SAFETY: between fork and exec, it only makes system calls.
        unsafe {
            command.pre_exec(|| {
                setsid()?;
                Ok(ioctl_tiocsctty(std::io::stdin().as_fd())?)
            });
        }
        let child = command.spawn().unwrap();
        // Otherwise the command would keep its end of the terminal open, and the screen would never end.
        command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null());
        let keyboard = File::from(controller);
        let mut output = keyboard.try_clone().unwrap();
        let (sender, screen) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // The terminal reports an error when the program ends.
            while let Ok(count @ 1..) = output.read(&mut buffer) {
                if sender.send(buffer[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, keyboard, screen, text: String::new() }
    }

    /// Sends keys.
    pub fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the screen shows the text. Returns everything up to its end.
    pub fn wait_for(&mut self, expected: &str) -> String {
        loop {
            if let Some(at) = self.text.find(expected) {
                let rest = self.text.split_off(at + expected.len());
                return std::mem::replace(&mut self.text, rest);
            }
            self.receive(expected);
        }
    }

    /// Waits until the screen shows `length` more characters.
    pub fn wait_for_length(&mut self, length: usize) {
        while self.text.len() < length {
            self.receive("more text");
        }
    }

    /// Waits for the end of the program.
    pub fn end(self) -> ExitStatus {
        self.end_with_text().0
    }

    /// Waits for the end of the program; also returns its output since the last wait.
    pub fn end_with_text(mut self) -> (ExitStatus, String) {
        while let Ok(bytes) = self.screen.recv_timeout(TIMEOUT) {
            self.text += &String::from_utf8_lossy(&bytes);
        }
        (self.child.wait().unwrap(), std::mem::take(&mut self.text))
    }

    fn receive(&mut self, what: &str) {
        match self.screen.recv_timeout(TIMEOUT) {
            Ok(bytes) => self.text += &String::from_utf8_lossy(&bytes),
            Err(error) => panic!("waiting for {what:?}: {error}; the screen shows {:?}", self.text),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
