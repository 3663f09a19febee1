//! What can be wrong with an image.

pub type Result<T> = std::result::Result<T, Error>;

#[derive(thiserror::Error, Debug)]
pub enum Error {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// What is written in it can't be.
    #[error("the image is damaged: {0}")]
    Damaged(String),
    /// It may be in order, and is not read here; says why, and what to do.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    /// Of a format that others read.
    pub fn other(what: &str) -> Error {
        Error::Refused(format!("it is {what}; make a qcow2 of it: `qemu-img convert -O qcow2 IMAGE NEW.qcow2`"))
    }

    pub fn damaged(what: impl Into<String>) -> Error {
        Error::Damaged(what.into())
    }
}
