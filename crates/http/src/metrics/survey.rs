//! Facts for the page beside those that can be asked for: from the memory of a host, and files of its machine.

use holdfast_api::{Error, Finding, HostStatus, Neighbour, SlowInfo, TaskInfo};

/// A certificate that this machine goes by.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Certificate {
    /// `authority`, `host NAME` or `node NUMBER`.
    pub role: String,
    /// Seconds since 1970.
    pub ends_s: u64,
}

/// All requests of guests since the host was started, by how long they took; or by how long they were in one stage.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Times {
    /// `read` or `write`.
    pub op: &'static str,
    /// None of whole requests.
    pub stage: Option<&'static str>,
    /// Upper bounds in microseconds, that rise, and how many took that long but longer than the bound before. The last is
    /// of all that took longer, and has none.
    pub buckets: Vec<(Option<u64>, u64)>,
    /// Microseconds of all together.
    pub sum_us: u64,
}

/// Tells of a host and its machine. Each may block, and fails where it can't be told; nothing asks the metadata store,
/// other hosts or nodes.
pub trait Survey: Send + Sync {
    /// Rates and depths of volumes of the host that are in use.
    ///
    /// # Errors
    /// The host does not answer.
    fn loads(&self) -> Result<Vec<Neighbour>, Error>;

    /// Stages of these volumes' requests, for those that are in service here.
    ///
    /// # Errors
    /// The host does not answer.
    fn slow(&self, names: &[String]) -> Result<Vec<(String, SlowInfo)>, Error>;

    /// Times of all requests since the host was started, whole and by stage. Bounds are the same for all, and at each host.
    ///
    /// # Errors
    /// The host does not answer.
    fn times(&self) -> Result<Vec<Times>, Error>;

    /// Tasks that the host has in the background.
    ///
    /// # Errors
    /// Records can't be read.
    fn tasks(&self, status: &HostStatus) -> Result<Vec<TaskInfo>, Error>;

    /// Things that are not well, as `holdfast status` says them; without a status that the host does not answer.
    ///
    /// # Errors
    /// Files of the machine can't be read.
    fn findings(&self, status: Option<&HostStatus>) -> Result<Vec<Finding>, Error>;

    /// None in a grid without TLS.
    ///
    /// # Errors
    /// They can't be read.
    fn certificates(&self) -> Result<Vec<Certificate>, Error>;

    /// Members of the metadata store that the host is told of; none where that is a file.
    ///
    /// # Errors
    /// Their number is not known.
    fn members(&self) -> Result<usize, Error>;
}
