//! `holdfast-restore`: what a repository of backups has, and a backup as a raw image. No grid is needed, and nothing is
//! written to the repository but a lock.

use clap::{CommandFactory, Parser, Subcommand};
use holdfast_backup::{Backup, Error, Repository, Restored, Result, key_file, to_file, to_output, verify};
use holdfast_base::size::Size;
use std::io::{Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Parser, Debug)]
#[command(
    name = "holdfast-restore",
    version,
    about = "Disks out of backups of Holdfast, without a grid",
    after_help = "Examples:\n  \
        holdfast-restore list /mnt/nas/holdfast\n  \
        holdfast-restore get /mnt/nas/holdfast vm1 vm1.raw\n  \
        holdfast-restore get s3:https://s3.example.com/backups/grid vm1 - | dd of=/dev/sdx bs=1M\n  \
        qemu-img convert -f raw -O qcow2 vm1.raw vm1.qcow2\n\n\
        For an S3 store the environment has AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION."
)]
struct Cli {
    /// The key of an encrypted repository
    #[arg(long, global = true, env = "HOLDFAST_BACKUP_KEY_FILE", value_name = "FILE")]
    key_file: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Backups, oldest first
    List { repository: String },
    /// A backup, or the latest of a volume, as a raw image
    Get {
        repository: String,
        /// Its id, or the name of a volume
        backup: String,
        /// A new file, or `-` for standard output
        image: PathBuf,
        /// Zeroes in the place of what can't be read
        #[arg(long)]
        skip_damaged: bool,
    },
    /// Read all that backups need
    Verify { repository: String },
    /// Print the page for `man`
    #[command(hide = true)]
    Man,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(why) => {
            eprintln!("holdfast-restore: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    let key = cli.key_file.as_deref().map(key_file::read).transpose()?;
    match cli.command {
        Command::List { repository } => {
            let catalogue = Repository::open(&repository, key)?.catalogue()?;
            for backup in &catalogue.backups {
                let Backup { id, manifest, .. } = backup;
                say(format_args!(
                    "{id}  {}  {}, {} of data",
                    manifest.source.volume,
                    Size(manifest.size_bytes),
                    Size(manifest.data_bytes)
                ))?;
            }
            for (id, why) in &catalogue.unreadable {
                say(format_args!("{id}  can't be read: {why}"))?;
            }
            Ok(if catalogue.unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::Get { repository, backup, image, skip_damaged } => {
            let repository = Repository::open(&repository, key)?;
            let catalogue = repository.catalogue()?;
            for (id, why) in &catalogue.unreadable {
                eprintln!("backup {id} can't be read, and may be the latest: {why}");
            }
            let backup = catalogue.find(&backup)?;
            let restored = match image == Path::new("-") {
                true => to_output(&repository, backup, &mut stdout().lock(), skip_damaged, |_| {})?,
                false => to_file(&repository, backup, &image, skip_damaged, |_| {})?,
            };
            let Restored { data_bytes, damaged } = restored;
            eprintln!("{} of volume {}: {} of data", backup.id, backup.manifest.source.volume, Size(data_bytes));
            for range in &damaged {
                eprintln!("zeroes in the place of {} bytes at {}", range.end - range.start, range.start);
            }
            Ok(if damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::Man => {
            let page = clap_mangen::Man::new(Cli::command());
            page.render(&mut stdout()).map_err(|why| Error::Store(why.to_string()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Verify { repository } => {
            let verified = verify(&Repository::open(&repository, key)?, false, false, |_, _| {})?;
            for damage in &verified.damage {
                say(format_args!("{} (needed by {})", damage.why, damage.backups.join(", ")))?;
            }
            say(format_args!("{} backups, {} objects read", verified.backups, verified.objects))?;
            Ok(if verified.damage.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

fn say(text: std::fmt::Arguments) -> Result<()> {
    writeln!(stdout(), "{text}")
        .or_else(|why| match why.kind() {
            std::io::ErrorKind::BrokenPipe => Ok(()),
            _ => writeln!(stderr(), "{why}"),
        })
        .map_err(|why| Error::Store(why.to_string()))
}
